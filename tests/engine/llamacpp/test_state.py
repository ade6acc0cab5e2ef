"""Requantised state equals state that was computed with those cells."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rekindle.engine.base import EngineOptions, KvType
from rekindle.engine.llamacpp.engine import LlamaCppEngine
from rekindle.engine.llamacpp.state import BlockLayout, _floats, read_layout
from rekindle.errors import CorruptBlock
from tests.contract.actions import PROMPT, prefill

TOKENS = 40


@pytest.fixture(scope="module")
def engine(smollm2_path: Path) -> Iterator[LlamaCppEngine]:
    """Heads are 64 wide, so llama.cpp rotates what it quantises."""
    built = LlamaCppEngine(
        EngineOptions(path=smollm2_path, parallel=1, threads=2, context_tokens=512)
    )
    yield built
    built.close()


def state(engine: LlamaCppEngine, kv_type: KvType) -> bytes:
    sequence = engine.sequences.open(exact=True, kv_type=kv_type)
    prefill(engine, sequence, PROMPT[:TOKENS])
    blob = bytes(engine.sequences.export(sequence, 0, TOKENS))
    engine.sequences.close(sequence)
    return blob


def first_keys(layout: BlockLayout, blob: bytes) -> np.ndarray[Any, Any]:
    """Return the keys of the first layer, which do not depend on other cells."""
    rows = layout.sections[0][0]
    at = 8 + 8 + TOKENS * layout.cell_bytes + 16 + 12
    return _floats(rows, memoryview(blob)[at : at + TOKENS * rows.row_bytes])


@pytest.mark.parametrize("kv_type", ["q8_0", "q4_0"])
def test_requantised_keys_equal_keys_computed_at_that_precision(
    engine: LlamaCppEngine, kv_type: KvType
) -> None:
    layout = engine.sequences.layouts.measured(kv_type)
    assert {rows.rotation for rows in layout.sections[0]} == {64}
    transcoded = engine.sequences.requantise(state(engine, "f16"), TOKENS, "f16", kv_type)
    mine, theirs = (first_keys(layout, blob) for blob in (transcoded, state(engine, kv_type)))
    step = np.abs(theirs).max() / (127 if kv_type == "q8_0" else 7)
    assert np.abs(mine - theirs).mean() < 0.02 * step  # all but values at the edge of two steps


def test_8_bit_state_can_become_4_bit_state(engine: LlamaCppEngine) -> None:
    layout, eight = engine.sequences.layouts.measured("q4_0"), state(engine, "q8_0")
    mine = first_keys(layout, engine.sequences.requantise(eight, TOKENS, "q8_0", "q4_0"))
    theirs = first_keys(engine.sequences.layouts.measured("q8_0"), eight)
    assert np.abs(mine - theirs).max() <= np.abs(theirs).max() / 7


def test_a_block_with_a_wrong_header_is_refused(engine: LlamaCppEngine) -> None:
    blob = bytearray(state(engine, "f16"))
    blob[12] ^= 1  # the number of its cells
    with pytest.raises(CorruptBlock):
        engine.sequences.requantise(blob, TOKENS, "f16", "q8_0")
    with pytest.raises(CorruptBlock):
        engine.sequences.requantise(blob[:-1], TOKENS, "f16", "q8_0")


def test_an_unknown_state_layout_is_only_measured() -> None:
    """It is not requantised. Blocks still need the right size."""
    layout = read_layout(b"x" * 100, b"x" * 130, 0)
    assert (layout.fixed, layout.each, layout.sections) == (70, 30, ())
    with pytest.raises(CorruptBlock):
        layout.split(b"x" * 101, 1, resumable=False)
