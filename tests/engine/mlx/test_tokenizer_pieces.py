"""A token becomes bytes by the decoder in tokenizer.json."""

from __future__ import annotations

from typing import Any

import pytest

from rekindle.engine.mlx.tokenizer import piece_decoder
from rekindle.errors import ModelError

METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first"}


@pytest.mark.parametrize(
    ("decoder", "text", "piece"),
    [
        (None, "▁a", "▁a".encode()),
        ({"type": "ByteLevel"}, "ĠÃ©Ċ", " é\n".encode()),
        ({"type": "ByteLevel"}, "<▁end▁>", "<▁end▁>".encode()),
        (METASPACE, "▁the", b" the"),
        (METASPACE, "<0xE9>", b"<0xE9>"),
        (
            {"type": "Sequence", "decoders": [METASPACE, {"type": "ByteFallback"}]},
            "<0xE9>",
            b"\xe9",
        ),
        ({"type": "Sequence", "decoders": [{"type": "Fuse"}]}, "a", b"a"),
        ({"type": "Replace", "pattern": {"String": "_"}, "content": "-"}, "a_b", b"a-b"),
    ],
)
def test_a_token_becomes_its_bytes(decoder: Any, text: str, piece: bytes) -> None:
    assert piece_decoder(decoder)(text) == piece


@pytest.mark.parametrize(
    "decoder",
    [
        {"type": "BPEDecoder", "suffix": "</w>"},
        {"type": "Replace", "pattern": {"Regex": "a+"}, "content": ""},
        {"type": "Replace", "pattern": {"String": ""}, "content": "x"},
        {"type": "Sequence", "decoders": [{"type": "CTC"}]},
        {},
        3,
    ],
)
def test_a_decoder_that_depends_on_neighbours_is_refused(decoder: Any) -> None:
    with pytest.raises(ModelError, match="not supported"):
        piece_decoder(decoder)
