"""NumPy's BERT against llama.cpp's, on the same weights."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from rekindle.engine.base import EngineOptions, Matrix
from rekindle.engine.llamacpp import bert as bert_file
from rekindle.engine.llamacpp import bert as bert_layer
from rekindle.engine.llamacpp import embedder
from rekindle.engine.llamacpp.bert import Bert
from rekindle.engine.llamacpp.embedder import EmbeddingContext, LlamaCppEmbedder
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
def test_both_make_the_same_vectors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pooling: int
) -> None:
    path = write_bert(tmp_path / "bert.gguf", pooling=pooling)
    found = [embed(path, threads=threads, by_numpy=True) for threads in (1, 3)]
    monkeypatch.setattr(embedder, "open_bert", lambda *_: None)
    native = embed(path, threads=1, by_numpy=False)
    for each in found:
        assert (each * native).sum(axis=1).min() > 0.9999


def test_a_vector_does_not_depend_on_what_is_computed_beside_it(tmp_path: Path) -> None:
    loaded = LlamaCppEmbedder(EngineOptions(path=write_bert(tmp_path / "bert.gguf"), threads=2))
    together = loaded.embed(inputs())
    alone = np.concatenate([loaded.embed([each]) for each in inputs()])
    loaded.close()
    assert np.allclose(together, alone, atol=1e-5)


def test_large_scores_are_exponentiated_safely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_bert(tmp_path / "bert.gguf")
    usual = embed(path, threads=2, by_numpy=True)
    monkeypatch.setattr(bert_layer, "SAFE_SCORE", 0)
    assert np.allclose(embed(path, threads=2, by_numpy=True), usual, atol=1e-5)


@pytest.mark.parametrize("other", ["quantised", "ranks", "decoder", "machine"])
def test_what_is_no_plain_bert_on_such_a_machine_is_left_to_llama_cpp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    path = tmp_path / "model.gguf"
    if other == "decoder":
        write_llama(path, context=128)
    else:
        write_bert(path, quantised=other == "quantised", classes=int(other == "ranks"))
    if other == "machine":
        monkeypatch.setattr(bert_file, "FAST_MACHINES", ())
    loaded = LlamaCppEmbedder(EngineOptions(path=path, threads=1))
    assert isinstance(loaded._computes, EmbeddingContext)
    loaded.close()
