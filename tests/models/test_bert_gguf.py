"""The GGUF file of a BERT has every tensor and word in its place."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from rekindle.engine.base import EngineOptions
from rekindle.engine.llamacpp.embedder import LlamaCppEmbedder
from rekindle.models.bert_gguf import write_bert_gguf

from .bert_parts import LAYERS, WIDTH, WORDS, weights, write_parts


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_parts(tmp_path / "parts")
    write_bert_gguf("bert", tmp_path / "parts", tmp_path / "bert.gguf", lambda _: None)
    return tmp_path / "bert.gguf"


def test_every_tensor_is_there_under_the_formats_name(path: Path) -> None:
    found = {each.name: each for each in gguf.GGUFReader(path).tensors}
    own = weights()
    assert len(found) == len(own)
    pairs = {
        "token_embd.weight": "embeddings.word_embeddings.weight",
        "token_types.weight": "embeddings.token_type_embeddings.weight",
        "token_embd_norm.bias": "embeddings.LayerNorm.bias",
        "blk.1.attn_v.weight": "encoder.layer.1.attention.self.value.weight",
        "blk.0.ffn_down.weight": "encoder.layer.0.output.dense.weight",
        "blk.1.layer_output_norm.weight": "encoder.layer.1.output.LayerNorm.weight",
    }
    for ours, theirs in pairs.items():
        assert np.allclose(found[ours].data, own[theirs], atol=2e-3)


def test_words_are_spelled_as_the_format_wants_them(path: Path) -> None:
    fields = gguf.GGUFReader(path).fields
    words = fields["tokenizer.ggml.tokens"].contents()
    kinds = fields["tokenizer.ggml.token_type"].contents()
    assert words[-5:] == ["[unused0]", "\u2581cat", "s", "\u2581[", "\u2581\u2028"]
    assert kinds == [3] * 5 + [5] + [1] * 4
    assert fields["tokenizer.ggml.seperator_token_id"].contents() == WORDS.index("[SEP]")


def test_the_engine_loads_what_was_written(path: Path) -> None:
    embedder = LlamaCppEmbedder(EngineOptions(path=path, threads=1))
    try:
        tokens = embedder.encode("Cats")
        assert [WORDS[token] for token in tokens] == ["[CLS]", "cat", "##s", "[SEP]"]
        assert embedder.embed([tokens]).shape == (1, WIDTH)
        assert embedder._model.layers == LAYERS
    finally:
        embedder.close()
