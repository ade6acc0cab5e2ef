"""The bytes of a block: how many there are, and what makes them interchangeable."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from rekindle.engine.base import Blob, KvType
from rekindle.engine.llamacpp.context import Context, Rows
from rekindle.errors import CorruptBlock

STATE_FORMAT = "llama.cpp state, xllamacpp 2026.10.11549, unified, flash attention, "  # + KV type


@dataclass(frozen=True, slots=True)
class StateBytes:
    """A block of n tokens has fixed + n * each bytes, plus those of its checkpoint if it has one;
    anything else is not a block of ours."""

    fixed: int
    each: int
    checkpoint: int  # 0: state can be truncated anywhere, so there are none

    def split(self, blob: Blob, tokens: int, *, resumable: bool) -> tuple[memoryview, memoryview]:
        """A block's cells and its checkpoint; sizes are checked before llama.cpp sees a byte."""
        view = memoryview(blob).cast("B")
        cells = self.fixed + tokens * self.each
        if len(view) != cells + resumable * self.checkpoint:
            raise CorruptBlock(f"a block of {tokens} tokens cannot have {len(view)} bytes")
        return view[:cells], view[cells:]


def measure_state(context: Context) -> StateBytes:
    """Export blocks of one and of two tokens, and forget them."""
    context.decode([Rows(0, 0, [0, 0], False)])
    one, two = (len(context.export(0, 0, tokens)) for tokens in (1, 2))
    checkpoint = len(context.checkpoint(0)) if context.shape.recurrent else 0
    context.clear()
    return StateBytes(2 * one - two, two - one, checkpoint)


def state_fingerprint(path: Path, kv_type: KvType) -> bytes:
    """Weights, tokenizer and template are one file: its hash, with the state's layout."""
    weights = blake3(max_threads=blake3.AUTO).update_mmap(path).digest()
    return blake3((STATE_FORMAT + kv_type).encode() + weights).digest()
