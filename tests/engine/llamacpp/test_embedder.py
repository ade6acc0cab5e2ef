"""Embeddings and scores through llama.cpp use the pooling of the model file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest

from rekindle.engine.base import EngineOptions
from rekindle.engine.llamacpp.embedder import LlamaCppEmbedder
from rekindle.engine.llamacpp.engine import LlamaCppEngine
from rekindle.errors import EngineBroken, ModelError
from tests.support.tiny import write_llama
from tests.support.tiny_bert import CLS, SEP, write_bert

Load = Callable[[Path], LlamaCppEmbedder]


@pytest.fixture
def load() -> Iterator[Load]:
    loaded: list[LlamaCppEmbedder] = []

    def loader(path: Path) -> LlamaCppEmbedder:
        loaded.append(LlamaCppEmbedder(EngineOptions(path=path, threads=1)))
        return loaded[-1]

    yield loader
    for embedder in loaded:
        embedder.close()


def test_a_decoder_with_last_pooling_differs_by_its_last_token(tmp_path: Path, load: Load) -> None:
    pooling = gguf.PoolingType.LAST
    last = load(write_llama(tmp_path / "last.gguf", context=64, pooling=pooling))
    mean = load(write_llama(tmp_path / "mean.gguf", context=64, pooling=gguf.PoolingType.MEAN))
    tokens = list(range(5, 45))
    changed = [tokens, [*tokens[:-1], 99]]
    (one, other), (first, second) = last.embed(changed), mean.embed(changed)
    assert one @ other < 0.9 < first @ second


def test_a_model_without_a_pooling_gets_the_default_of_its_kind(tmp_path: Path, load: Load) -> None:
    silent = load(write_llama(tmp_path / "silent.gguf", context=64))
    last = load(write_llama(tmp_path / "last.gguf", context=64, pooling=gguf.PoolingType.LAST))
    assert np.array_equal(silent.embed([[5, 6, 7]]), last.embed([[5, 6, 7]]))


def test_a_text_gets_the_tokens_that_the_model_wants_around_it(tmp_path: Path, load: Load) -> None:
    bert = load(write_bert(tmp_path / "bert.gguf"))
    tokens = bert.encode("The CAT sat [SEP]")
    assert tokens[0] == CLS
    assert tokens[-1] == SEP
    assert SEP not in tokens[:-1]  # what a user wrote is no control token


def test_a_model_with_a_head_scores_pairs_from_0_to_1(tmp_path: Path, load: Load) -> None:
    ranker = load(write_bert(tmp_path / "ranker.gguf", classes=1))
    assert ranker.info.ranks
    pair = ranker.pair("the cat", "a dog")
    assert [pair.count(CLS), pair.count(SEP), pair[-1]] == [1, 2, SEP]
    scores = ranker.rank([pair, ranker.pair("the cat", "the rain"), pair])
    assert scores[0] == pytest.approx(scores[2])
    assert scores[0] != pytest.approx(scores[1])
    assert all(0 < score < 1 for score in scores)


def test_a_classifier_is_refused(tmp_path: Path, load: Load) -> None:
    with pytest.raises(ModelError, match="sorts texts into 3 classes"):
        load(write_bert(tmp_path / "classes.gguf", classes=3))


def test_an_embedding_model_is_not_loaded_for_chat(tmp_path: Path) -> None:
    path = write_bert(tmp_path / "bert.gguf")
    with pytest.raises(ModelError, match=r"generates no text: give it as --embedding-model"):
        LlamaCppEngine(EngineOptions(path=path, threads=1))


def test_a_failed_call_does_not_affect_the_next_one(tmp_path: Path, load: Load) -> None:
    bert = load(write_bert(tmp_path / "bert.gguf", quantised=True))
    before = bert.embed([[5, 6, 7]])
    with pytest.raises(EngineBroken):
        bert.embed([[10**6]])  # no token of this vocabulary: the caller checks
    assert np.array_equal(bert.embed([[5, 6, 7]]), before)
