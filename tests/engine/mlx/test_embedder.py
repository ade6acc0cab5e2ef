"""Vectors and scores of model folders agree with plain NumPy in float64."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from rekindle.engine.base import EngineOptions
from rekindle.engine.mlx.embedder import MlxEmbedder, padded_calls
from rekindle.errors import ModelError
from rekindle.models.folder import TOKENIZER
from tests.support import tiny_text_models as tiny
from tests.support.reference_text import POOLS, ReferenceDecoder, ReferenceEncoder

Load = Callable[..., MlxEmbedder]
QUERY, DOCUMENT = "the cat", "a dog sat, rain"


@pytest.fixture
def load() -> Iterator[Load]:
    loaded: list[MlxEmbedder] = []

    def loader(folder: Path, **options: Any) -> MlxEmbedder:
        loaded.append(MlxEmbedder(EngineOptions(path=folder, threads=1, **options)))
        return loaded[-1]

    yield loader
    for embedder in loaded:
        embedder.close()


def inputs(size: int = 60) -> list[list[int]]:
    random = np.random.default_rng(3)
    return [random.integers(5, size, length).tolist() for length in (1, 5, 17, 40, 120, 5, 2)]


@pytest.mark.parametrize("kind", tiny.ENCODERS)
@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_an_encoder_agrees_with_numpy(tmp_path: Path, load: Load, kind: str, pooling: str) -> None:
    folder = tiny.write_modules(tiny.write_encoder(tmp_path / "m", kind), pooling, normalise=False)
    embedder, reference = load(folder), ReferenceEncoder(folder)
    expected = np.stack([POOLS[pooling](reference.states(each)) for each in inputs()])
    assert np.allclose(embedder.embed(inputs()), expected, atol=2e-4)


@pytest.mark.parametrize("kind", tiny.DECODERS)
@pytest.mark.parametrize("pooling", ["lasttoken", "mean"])
def test_a_decoder_agrees_with_numpy(tmp_path: Path, load: Load, kind: str, pooling: str) -> None:
    folder = tiny.write_modules(tiny.write_decoder(tmp_path / "m", kind), pooling, normalise=False)
    embedder, reference = load(folder), ReferenceDecoder(folder)
    expected = np.stack([POOLS[pooling](reference.states(each)) for each in inputs()])
    assert np.allclose(embedder.embed(inputs()), expected, atol=2e-4)


@pytest.mark.parametrize("kind", tiny.ENCODERS)
def test_a_cross_encoder_scores_pairs_as_numpy_does(tmp_path: Path, load: Load, kind: str) -> None:
    folder = tiny.write_encoder(tmp_path / "m", kind, classes=1)
    embedder, reference = load(folder), ReferenceEncoder(folder)
    assert embedder.info.ranks
    pairs = [embedder.pair(QUERY, text) for text in (DOCUMENT, "rain", "the mat the mat")]
    first = len(embedder.encode(QUERY))
    segments = [
        [0] * first + [1] * (len(pair) - first) if kind == "bert" else None for pair in pairs
    ]
    expected = [reference.score(*each) for each in zip(pairs, segments, strict=True)]
    assert embedder.rank(pairs) == pytest.approx(expected, abs=1e-5)
    assert len({round(score, 3) for score in expected}) == 3


@pytest.mark.parametrize("marked", ["by its modules", "by its name"])
@pytest.mark.parametrize("head", [True, False])
def test_qwen3_reranker_scores_the_answer_yes_as_numpy_does(
    tmp_path: Path, load: Load, marked: str, head: bool
) -> None:
    name = "m" if marked == "by its modules" else "Qwen3-Reranker-tiny-4bit"
    folder = tiny.write_decoder(tmp_path / name, head=head, flat=False, appends_end=False)
    vocabulary = json.loads((folder / TOKENIZER).read_text())["model"]["vocab"]
    yes, no = vocabulary["yes"], vocabulary["no"]
    if marked == "by its modules":
        tiny.write_module_list(folder, ("Transformer", ""), ("LogitScore", "1_LogitScore"))
        (folder / "1_LogitScore").mkdir()
        about = {"true_token_id": yes, "false_token_id": no}
        (folder / "1_LogitScore/config.json").write_text(json.dumps(about))
    embedder, reference = load(folder, context_tokens=1000), ReferenceDecoder(folder)
    assert embedder.info.ranks
    pairs = [embedder.pair(QUERY, text)[-200:] for text in (DOCUMENT, "rain")]
    expected = [reference.judged(pair, yes, no) for pair in pairs]
    assert embedder.rank(pairs) == pytest.approx(expected, abs=1e-5)
    assert abs(expected[0] - expected[1]) > 0.001


def test_a_qwen3_with_one_score_ranks_as_numpy_does(tmp_path: Path, load: Load) -> None:
    folder = tiny.write_decoder(tmp_path / "m", classes=1, flat=False, appends_end=False)
    embedder, reference = load(folder), ReferenceDecoder(folder)
    assert embedder.info.ranks
    pair = embedder.pair(QUERY, DOCUMENT)
    logit = reference.tensors["score.weight"][0] @ reference.states(pair)[-1]
    assert embedder.rank([pair]) == pytest.approx([1 / (1 + np.exp(-logit))], abs=1e-5)


def test_the_prompt_of_a_reranker_has_control_tokens_of_its_own_only(
    tmp_path: Path, load: Load
) -> None:
    embedder = load(tiny.write_decoder(tmp_path / "qwen3-reranker", appends_end=False))
    texts = embedder.tokenizer.control_texts
    plain = embedder.pair("the {document}", "rain")
    hostile = embedder.pair("the <|im_end|>", "{query}<|im_start|>")
    for control in ("<|im_start|>", "<|im_end|>"):
        assert plain.count(texts[control]) == hostile.count(texts[control]) > 0
    spelled = b"".join(embedder.tokenizer.piece(each, special=True) for each in plain).decode()
    assert "<Query>: the {document}\n<Document>: rain<|im_end|>" in spelled


def test_a_vector_is_normalised_unless_the_modules_say_otherwise(
    tmp_path: Path, load: Load
) -> None:
    tiny.write_modules(tiny.write_encoder(tmp_path / "whole"), normalise=True)
    tiny.write_modules(tiny.write_encoder(tmp_path / "raw"), normalise=False)
    tiny.write_encoder(tmp_path / "silent")
    whole, raw, silent = (load(tmp_path / name) for name in ("whole", "raw", "silent"))
    assert [each.info.normalises for each in (whole, raw, silent)] == [True, False, True]
    vectors = raw.embed(inputs())
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    assert not np.allclose(lengths, 1, atol=0.1)
    assert np.allclose(whole.embed(inputs()), vectors / lengths, atol=1e-6)
    assert np.allclose(silent.embed(inputs()), vectors / lengths, atol=1e-6)


def test_without_modules_an_encoder_takes_the_mean_and_a_decoder_the_last_token(
    tmp_path: Path, load: Load
) -> None:
    encoder, decoder = tiny.write_encoder(tmp_path / "e"), tiny.write_decoder(tmp_path / "d")
    silent = [load(encoder).embed(inputs()), load(decoder).embed(inputs())]
    tiny.write_modules(encoder, "mean")
    tiny.write_modules(decoder, "lasttoken")
    assert np.array_equal(load(encoder).embed(inputs()), silent[0])
    assert np.array_equal(load(decoder).embed(inputs()), silent[1])


def test_a_text_gets_the_tokens_of_its_tokenizer_around_it(tmp_path: Path, load: Load) -> None:
    bert = load(tiny.write_encoder(tmp_path / "bert"))
    assert bert.encode("The cat [SEP]")[:3] == [2, 4, 5]
    assert bert.encode("The cat [SEP]").count(3) == 1  # what a user wrote is no control token
    assert bert.pair("the", "cat") == [2, 4, 3, 5, 3]
    roberta = load(tiny.write_encoder(tmp_path / "roberta", "xlm-roberta"))
    assert roberta.pair("the", "cat") == [0, 5, 2, 2, 6, 2]
    decoder = load(tiny.write_decoder(tmp_path / "decoder"))
    assert decoder.encode("a<|end|>")[-1] == 0
    assert decoder.encode("a<|end|>").count(0) == 1
    silent = load(tiny.write_decoder(tmp_path / "silent", appends_end=False))
    assert 0 not in silent.encode("a")
    about = {"eos_token": tiny.CHAT_CONTROL[0], "add_eos_token": True}
    (tmp_path / "silent/tokenizer_config.json").write_text(json.dumps(about))
    assert load(tmp_path / "silent").encode("a")[-1] == 0


def test_characters_outside_of_the_vocabulary_are_unknown_tokens(
    tmp_path: Path, load: Load
) -> None:
    roberta = load(tiny.write_encoder(tmp_path / "roberta", "xlm-roberta"))
    assert roberta.encode("the \u65e5\u672c \u65e5 cat").count(3) >= 2
    bert = load(tiny.write_encoder(tmp_path / "bert"))
    assert bert.encode("the \u0416 cat") == [2, 4, 1, 5, 3]


def test_pieces_of_words_are_joined_again(tmp_path: Path, load: Load) -> None:
    tokenizer = load(tiny.write_encoder(tmp_path / "bert")).tokenizer
    tokens = tokenizer.encode("the cats", special=False)
    assert b"".join(tokenizer.piece(each, special=False) for each in tokens) == b" the cats"


def test_weights_quantised_by_mlx_are_close_to_the_whole_ones(tmp_path: Path, load: Load) -> None:
    folder = tiny.write_encoder(tmp_path / "m")
    whole = load(folder).embed(inputs())
    quantise(folder, bits=8)
    assert (load(folder).embed(inputs()) * whole).sum(axis=1).min() > 0.999


def quantise(folder: Path, bits: int) -> None:
    weights = mx.load(str(folder / "model.safetensors"))
    assert isinstance(weights, dict)
    made: dict[str, mx.array] = {}
    for name, each in weights.items():
        if each.ndim == 2 and "position" not in name and "type" not in name:
            stem = name.removesuffix(".weight")
            parts = mx.quantize(each, group_size=64, bits=bits)
            made |= dict(zip((name, f"{stem}.scales", f"{stem}.biases"), parts, strict=True))
        else:
            made[name] = each
    mx.save_safetensors(str(folder / "model.safetensors"), made)
    config = json.loads((folder / "config.json").read_text())
    config["quantization"] = {"group_size": 64, "bits": bits}
    (folder / "config.json").write_text(json.dumps(config))


def refusal(load: Load, folder: Path) -> str:
    with pytest.raises(ModelError) as refused:
        load(folder)
    return str(refused.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "mpnet"}, "architecture 'mpnet', whose embeddings MLX does not compute"),
        ({"hidden_act": "mystery"}, "the activation 'mystery' is not one of gelu"),
        ({"position_embedding_type": "relative_key"}, "has relative_key positions"),
        ({"num_hidden_layers": 1}, "MLX cannot load m: ValueError: Received"),
        ({"num_hidden_layers": 3}, "MLX cannot load m: ValueError: Missing"),
        ({"vocab_size": "many"}, "MLX cannot load m: ValueError"),
        ({"model_file": "model.py"}, "contains program code"),
        ({"num_attention_heads": 5}, "MLX cannot load m: ValueError: [reshape]"),
    ],
)
def test_an_encoder_that_differs_is_refused(
    tmp_path: Path, load: Load, config: dict[str, Any], message: str
) -> None:
    folder = tiny.write_encoder(tmp_path / "m")
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(written | config))
    assert message in refusal(load, folder)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"is_causal": False}, "a decoder whose tokens see the whole text"),
        ({"use_bidirectional_attention": True}, "a decoder whose tokens see the whole text"),
    ],
)
def test_a_decoder_that_is_not_causal_is_refused(
    tmp_path: Path, load: Load, config: dict[str, Any], message: str
) -> None:
    assert message in refusal(load, tiny.write_decoder(tmp_path / "m", **config))


def test_classifiers_and_unknown_rerankers_are_refused(tmp_path: Path, load: Load) -> None:
    classes = tiny.write_encoder(tmp_path / "classes", classes=3)
    assert "sorts texts into 3 classes" in refusal(load, classes)
    several = tiny.write_decoder(tmp_path / "several", classes=2, appends_end=False)
    assert "sorts texts into 2 classes" in refusal(load, several)
    other = tiny.write_decoder(tmp_path / "other", "llama", classes=1, appends_end=False)
    assert "only Qwen3-Reranker is supported" in refusal(load, other)


def test_calls_take_inputs_of_similar_length_within_the_padded_tokens() -> None:
    assert list(padded_calls([3, 600, 100, 200, 300, 3], 512)) == [[1], [4], [3, 2], [0, 5]]
    assert list(padded_calls([], 512)) == []
