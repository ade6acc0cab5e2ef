"""Embeddings and scores through llama.cpp use the pooling of the model file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest

from rekindle.engine.base import EngineOptions
from rekindle.engine.llamacpp.embedder import LlamaCppEmbedder
from rekindle.engine.llamacpp.engine import LlamaCppEngine
from rekindle.engine.rerank import QWEN3_PROMPT
from rekindle.errors import EngineBroken, ModelError
from tests.support.reference_text import ReferenceDecoder, ReferenceEncoder
from tests.support.tiny import write_llama
from tests.support.tiny_bert import CLS, SEP, write_bert
from tests.support.tiny_text_models import (
    write_cross_encoder_gguf,
    write_decoder,
    write_encoder,
    write_reranker_gguf,
)

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


def test_a_cross_encoder_scores_pairs_in_one_segment_as_numpy_does(
    tmp_path: Path, load: Load
) -> None:
    folder = write_encoder(tmp_path / "m", classes=1)
    reference = ReferenceEncoder(folder)
    ranker = load(write_cross_encoder_gguf(folder, tmp_path / "ranker.gguf"))
    pairs = [[2, 4, 5, 3, *rest, 3] for rest in ([6, 7], [8, 9, 10, 11], [4])]
    expected = [reference.score(pair) for pair in pairs]
    assert ranker.rank(pairs) == pytest.approx(expected, abs=1e-3)
    assert len({round(score, 2) for score in expected}) == 3


def test_qwen3_reranker_scores_the_answer_yes_as_numpy_does(tmp_path: Path, load: Load) -> None:
    folder = write_decoder(tmp_path / "m", appends_end=False)
    reference = ReferenceDecoder(folder)
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    yes, no = vocabulary["yes"], vocabulary["no"]
    ranker = load(write_reranker_gguf(folder, tmp_path / "ranker.gguf"))
    turned = load(write_reranker_gguf(folder, tmp_path / "turned.gguf", labels=("no", "yes")))
    pairs = [ranker.pair("the cat", text)[-100:] for text in ("a dog", "the cat sat", "rain")]
    expected = [reference.judged(pair, yes, no) for pair in pairs]
    assert ranker.rank(pairs) == pytest.approx(expected, abs=5e-3)  # its KV cells are f16
    assert turned.rank(pairs) == pytest.approx(expected, abs=5e-3)
    assert len({round(score, 2) for score in expected}) == 3


def test_qwen3_reranker_gets_the_prompt_of_its_file_or_the_known_one(
    tmp_path: Path, load: Load
) -> None:
    folder = write_decoder(tmp_path / "m", appends_end=False)
    silent = load(write_reranker_gguf(folder, tmp_path / "silent.gguf"))
    prompt = "<|im_start|>{query}|{document}<|im_end|>"
    named = load(write_reranker_gguf(folder, tmp_path / "named.gguf", prompt=prompt))
    control = named.tokenizer.control_texts
    expected = [
        control["<|im_start|>"],
        *named.tokenizer.encode("{document}<|im_end|>|rain", special=False),
        control["<|im_end|>"],
    ]
    assert named.pair("{document}<|im_end|>", "rain") == expected
    spelled = b"".join(silent.tokenizer.piece(each, special=True) for each in silent.pair("a", "b"))
    assert spelled.decode() == QWEN3_PROMPT.format(query="a", document="b")
    with pytest.raises(ModelError, match=r"has no \{query\} and \{document\}"):
        load(write_reranker_gguf(folder, tmp_path / "fixed.gguf", prompt="{query}"))


def test_a_qwen3_for_ranking_without_its_two_answers_is_refused(tmp_path: Path, load: Load) -> None:
    folder = write_decoder(tmp_path / "m", appends_end=False)
    with pytest.raises(ModelError, match="without the outputs yes and no"):
        load(write_reranker_gguf(folder, tmp_path / "one.gguf", labels=("score",)))


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
