from __future__ import annotations

import pytest

from rekindle.bench.stream import BenchFailed, Chunk, Usage, parse


def test_text_of_a_delta_is_the_text_of_the_chunk() -> None:
    assert parse('data: {"choices":[{"delta":{"content":" hi"}}]}') == Chunk(text=" hi")


def test_the_opening_role_carries_no_text() -> None:
    line = 'data: {"choices":[{"delta":{"role":"assistant","content":null}}]}'
    assert parse(line) == Chunk()


def test_a_thought_is_kept_apart_from_the_text() -> None:
    line = 'data: {"choices":[{"delta":{"reasoning_content":"hm"}}]}'
    assert parse(line) == Chunk(thought="hm")


@pytest.mark.parametrize("line", ["", ": ping", "event: message", "data: [DONE]", "data:[DONE]"])
def test_a_line_without_an_event_gives_no_chunk(line: str) -> None:
    assert parse(line) is None


def test_usage_is_read_from_a_chunk_without_choices() -> None:
    line = (
        'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":2,'
        '"prompt_tokens_details":{"cached_tokens":7}}}'
    )
    assert parse(line) == Chunk(usage=Usage(9, 2, 7))


def test_cached_tokens_are_unknown_where_the_server_does_not_say() -> None:
    line = 'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":2}}'
    assert parse(line) == Chunk(usage=Usage(9, 2, None))


def test_an_error_event_fails_with_the_servers_own_words() -> None:
    with pytest.raises(BenchFailed, match="out of memory"):
        parse('data: {"error":{"message":"out of memory"}}')


@pytest.mark.parametrize("data", ["not json", "[]", '{"choices":[3]}', '{"usage":{"total":1}}'])
def test_an_event_that_is_no_chunk_fails_and_is_shown(data: str) -> None:
    with pytest.raises(BenchFailed, match="no chunk"):
        parse(f"data: {data}")
