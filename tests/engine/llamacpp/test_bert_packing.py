from __future__ import annotations

from rekindle.engine.llamacpp.bert import packed


def test_inputs_are_packed_by_length_within_tokens_and_inputs() -> None:
    lengths = [3, 600, 100, 200, 300, 3]
    assert list(packed(lengths, 512, 3)) == [[1], [4, 3], [2, 0, 5]]
    assert list(packed([1] * 5, 512, 2)) == [[0, 1], [2, 3], [4]]
    assert list(packed([], 512, 2)) == []
