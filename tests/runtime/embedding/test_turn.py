"""A request for embeddings or scores: how it is validated, and how its answer is assembled."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rekindle.errors import BadRequest
from rekindle.protocol.events import Embedded, Ranked
from rekindle.protocol.requests import EmbedRequest, RankRequest
from rekindle.runtime.embedding.turn import EmbeddingTurn, encode_inputs
from tests.support.fake_embedder import DIMENSIONS, FakeEmbedder, vector_of


def finish(turn: EmbeddingTurn, embedder: FakeEmbedder) -> Embedded | Ranked:
    while turn.missing:
        each = turn.missing.pop()
        [row] = embedder.embed([each.tokens])
        turn.accept(each, row)
    return turn.result()


def embed(*inputs: str | list[int | str], **fields: Any) -> Embedded:
    embedder = FakeEmbedder()
    result = finish(encode_inputs(embedder, EmbedRequest(inputs=list(inputs), **fields)), embedder)
    assert isinstance(result, Embedded)
    return result


def rows(embedded: Embedded) -> Any:
    return np.frombuffer(embedded.vectors, "<f4").reshape(-1, embedded.dimensions)


def test_vectors_have_the_order_of_the_inputs() -> None:
    found = embed("1 2 3", "4", "5 6")
    expected = [vector_of([1, 2, 3]), vector_of([4]), vector_of([5, 6])]
    assert np.array_equal(rows(found), expected)
    assert (found.prompt_tokens, found.reused_tokens) == (6, 0)


def test_a_long_text_is_cut_to_the_context_and_keeps_its_last_token() -> None:
    long = " ".join(map(str, range(1, 40)))
    embedder = FakeEmbedder(context_tokens=16)
    turn = encode_inputs(embedder, EmbedRequest(inputs=["7", long], truncate=True))
    assert [each.tokens for each in turn.missing] == [[7], [*range(1, 16), 39]]


def test_equal_inputs_are_computed_once_whether_sent_as_text_or_tokens() -> None:
    embedder = FakeEmbedder()
    turn = encode_inputs(embedder, EmbedRequest(inputs=["1 2", "3", [1, 2], "1 2"]))
    found = finish(turn, embedder)
    assert isinstance(found, Embedded)
    assert len(embedder.calls) == 2
    assert (found.prompt_tokens, found.reused_tokens) == (7, 4)
    assert np.array_equal(rows(found)[[0, 2]], [vector_of([1, 2])] * 2)


def test_fewer_dimensions_truncate_and_normalise_the_vectors() -> None:
    found = embed("1 2", dimensions=3)
    first = vector_of([1, 2])[:3]
    assert np.allclose(rows(found), first / np.linalg.norm(first))
    assert found.dimensions == 3
    assert embed("1 2", dimensions=DIMENSIONS) == embed("1 2")


def test_fewer_dimensions_of_a_model_that_does_not_normalise_are_only_cut() -> None:
    embedder = FakeEmbedder(normalises=False)
    turn = encode_inputs(embedder, EmbedRequest(inputs=["1 2"], dimensions=3))
    found = finish(turn, embedder)
    assert isinstance(found, Embedded)
    assert np.array_equal(rows(found)[0], vector_of([1, 2])[:3])


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (["1", "1 " * 17], r"`input\[1\]` has 17 tokens; this model takes 16"),
        (["1", "1 " * 5000], r"`input\[1\]` has at least 2500 tokens"),
        (["1", [1] * 17], r"`input\[1\]` has 17 tokens"),
        (["1", [1000]], r"`input\[1\]` has token ids of another model: .* from 0 to 999"),
        ([[-1]], r"`input\[0\]` has token ids of another model"),
        (["1", ""], r"`input\[1\]` has no tokens"),
    ],
)
def test_an_error_names_the_invalid_input(
    inputs: list[str | list[int | str]], message: str
) -> None:
    with pytest.raises(BadRequest, match=message) as raised:
        encode_inputs(FakeEmbedder(), EmbedRequest(inputs=inputs))
    assert raised.value.param == "input"


def test_more_dimensions_than_the_model_has_are_rejected() -> None:
    with pytest.raises(BadRequest, match="`dimensions` may be at most 8"):
        encode_inputs(FakeEmbedder(), EmbedRequest(inputs=["1"], dimensions=9))


def test_an_embedding_model_does_not_rank_and_a_reranker_does_not_embed() -> None:
    with pytest.raises(BadRequest, match="makes no vectors"):
        encode_inputs(FakeEmbedder(ranks=True), EmbedRequest(inputs=["1"]))
    with pytest.raises(BadRequest, match="cannot rank"):
        encode_inputs(FakeEmbedder(), RankRequest(query="1", documents=["2"]))
    with pytest.raises(BadRequest, match=r"`documents\[1\]` has 17 tokens"):
        encode_inputs(FakeEmbedder(ranks=True), RankRequest(query="1", documents=["2", "3 " * 16]))


def test_an_input_may_mix_token_ids_and_texts() -> None:
    turn = encode_inputs(FakeEmbedder(), EmbedRequest(inputs=[[1, "2 3", 4], ["5"]]))
    assert sorted(each.tokens for each in turn.missing) == [[1, 2, 3, 4], [5]]
    with pytest.raises(BadRequest, match="token ids of another model"):
        encode_inputs(FakeEmbedder(), EmbedRequest(inputs=[[10**9, "1"]]))
