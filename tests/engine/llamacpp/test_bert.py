"""The BERT of NumPy agrees with that of llama.cpp."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest

from rekindle.engine.base import EngineOptions, Matrix
from rekindle.engine.llamacpp import bert as bert_module
from rekindle.engine.llamacpp import embedder
from rekindle.engine.llamacpp.bert import COPIED, IN_PLACE, Bert, Tiling, Weights, packed
from rekindle.engine.llamacpp.embedder import EmbeddingContext, LlamaCppEmbedder
from rekindle.engine.llamacpp.thread_team import MIN_WORK, Share, ThreadTeam, alone
from tests.support.tiny import write_llama
from tests.support.tiny_bert import write_bert


def inputs() -> list[list[int]]:
    random = np.random.default_rng(3)
    lengths = [1, 5, 5, 5, 17, 40, 40, 128, 2] * 8
    return [random.integers(4, 60, length).tolist() for length in lengths]


def embed(path: Path, *, threads: int, by_numpy: bool) -> Matrix:
    loaded = LlamaCppEmbedder(EngineOptions(path=path, threads=threads))
    try:
        assert isinstance(loaded._computes, Bert) == by_numpy
        return loaded.embed(inputs())
    finally:
        loaded.close()


@pytest.mark.parametrize("pooling", [gguf.PoolingType.MEAN, gguf.PoolingType.CLS])
def test_numpy_and_llama_cpp_compute_the_same_vectors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pooling: int
) -> None:
    path = write_bert(tmp_path / "bert.gguf", pooling=pooling)
    found = [embed(path, threads=threads, by_numpy=True) for threads in (1, 3)]
    monkeypatch.setattr(embedder, "open_bert", lambda *_: None)
    native = embed(path, threads=1, by_numpy=False)
    for each in found:
        assert (each * native).sum(axis=1).min() > 0.9999


def test_a_vector_does_not_depend_on_other_inputs_of_the_call(tmp_path: Path) -> None:
    loaded = LlamaCppEmbedder(EngineOptions(path=write_bert(tmp_path / "bert.gguf"), threads=2))
    together = loaded.embed(inputs())
    alone = np.concatenate([loaded.embed([each]) for each in inputs()])
    loaded.close()
    assert np.allclose(together, alone, atol=1e-5)


def test_large_scores_are_exponentiated_safely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_bert(tmp_path / "bert.gguf")
    expected = embed(path, threads=2, by_numpy=True)
    monkeypatch.setattr(bert_module, "SAFE_SCORE", 0)
    assert np.allclose(embed(path, threads=2, by_numpy=True), expected, atol=1e-5)


@pytest.mark.parametrize("other", ["quantised", "ranks", "decoder", "machine"])
def test_other_models_and_machines_are_left_to_llama_cpp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    path = tmp_path / "model.gguf"
    if other == "decoder":
        write_llama(path, context=128)
    else:
        write_bert(path, quantised=other == "quantised", classes=int(other == "ranks"))
    if other == "machine":
        monkeypatch.setattr(bert_module, "FAST_MACHINES", ())
    loaded = LlamaCppEmbedder(EngineOptions(path=path, threads=1))
    assert isinstance(loaded._computes, EmbeddingContext)
    loaded.close()


INPUTS, OUTPUTS, SHARDS = 384, 192, 2


@pytest.fixture(scope="module")
def team() -> Iterator[ThreadTeam]:
    made = ThreadTeam(2, "test")
    yield made
    made.close()


@pytest.fixture(params=["alone", "shared"])
def share(request: pytest.FixtureRequest, team: ThreadTeam) -> Share:
    if request.param == "alone":
        return alone
    return lambda compute, count, _item_work: team.share(compute, count, MIN_WORK)


@pytest.mark.parametrize("tiling", [IN_PLACE, COPIED])
@pytest.mark.parametrize("count", [1, 7, 78, 79, 200])  # about what one product takes, and more
def test_shards_of_panels_give_the_plain_product(tiling: Tiling, count: int, share: Share) -> None:
    random = np.random.default_rng(count)
    weight = random.standard_normal((OUTPUTS, INPUTS)).astype(np.float32)
    bias = random.standard_normal(OUTPUTS).astype(np.float32)
    rows = random.standard_normal((count, INPUTS)).astype(np.float32)
    weights = Weights(3 * weight.size, SHARDS, tiling)
    every = slice(0, SHARDS)
    whole = weights.whole(weight, bias)(rows, slice(0, 1), share)[0]
    by_outputs = weights.by_outputs(weight, bias)(rows, every, share)
    inputs = rows.reshape(count, SHARDS, -1).swapaxes(0, 1)
    by_inputs = weights.by_inputs(weight)(inputs, every, share)
    for made in (whole, np.concatenate(by_outputs, axis=1), by_inputs.sum(axis=0) + bias):
        assert np.allclose(made, rows @ weight.T + bias, atol=1e-3)


def test_inputs_are_packed_by_length_within_tokens_and_inputs() -> None:
    lengths = [3, 600, 100, 200, 300, 3]
    assert list(packed(lengths, 512, 3)) == [[1], [4, 3], [2, 0, 5]]
    assert list(packed([1] * 5, 512, 2)) == [[0, 1], [2, 3], [4]]
    assert list(packed([], 512, 2)) == []
