"""The bytes that a token stands for, by the decoder that tokenizer.json describes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from rekindle.errors import ModelError

Spelled = Callable[[str], bytes]  # from a token as the vocabulary spells it
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


def byte_spellings() -> dict[str, int]:
    """GPT-2's printable character for each byte, the other way round."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    named = {chr(byte): byte for byte in printable}
    return named | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTES = byte_spellings()


def piece_decoder(decoder: Any) -> Spelled:
    """How tokens become bytes; raises ModelError where that depends on their neighbours."""
    steps = list(_steps(decoder))
    if any(step["type"] == "ByteLevel" for step in steps):
        return _from_byte_level
    replaced = [pair for step in steps if (pair := _replacement(step))]
    has_bytes = any(step["type"] == "ByteFallback" for step in steps)

    def spelled(text: str) -> bytes:
        if has_bytes and (byte := _BYTE.fullmatch(text)):
            return bytes.fromhex(byte[1])
        for old, new in replaced:
            text = text.replace(old, new)
        return text.encode()

    return spelled


def _from_byte_level(text: str) -> bytes:
    try:
        return bytes(_BYTES[character] for character in text)
    except KeyError:
        return text.encode()  # added to the vocabulary as it is


def _steps(decoder: Any) -> Iterator[dict[str, Any]]:
    """The decoders of a sequence, one after the other."""
    if decoder is None:
        return
    if not isinstance(decoder, dict):
        raise _unknown(decoder)
    if decoder.get("type") == "Sequence":
        for each in decoder.get("decoders", ()):
            yield from _steps(each)
    else:
        yield {"type": None} | decoder


def _replacement(step: dict[str, Any]) -> tuple[str, str] | None:
    """What a decoder puts in place of what."""
    match step:
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if old:
            return old, new
        case {"type": "Metaspace", "replacement": str(old)} if old:
            return old, " "
        case {"type": "ByteFallback" | "Fuse" | "Strip"}:  # the last two are of whole texts
            return None
    raise _unknown(step["type"])


def _unknown(kind: object) -> ModelError:
    return ModelError(
        f"The tokenizer's decoder {str(kind)[:100]!r} is not supported: use a model with a "
        "byte-level or SentencePiece vocabulary."
    )
