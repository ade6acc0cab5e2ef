"""Parking compacts a pool after many turns have ended."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rekindle.engine.base import EngineOptions
from rekindle.engine.llamacpp import parking
from rekindle.engine.llamacpp.engine import LlamaCppEngine
from tests.contract.actions import PROMPT, cold, decode, prefill
from tests.support.tiny import write_llama


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LlamaCppEngine]:
    monkeypatch.setattr(parking, "MIN_GAP_TOKENS", 0)
    path = write_llama(tmp_path / "model.gguf")
    engine = LlamaCppEngine(EngineOptions(path=path, parallel=4, threads=1, park_fraction=0.01))
    yield engine
    engine.close()


def test_the_last_of_many_turns_is_compacted_and_continues_unchanged(
    engine: LlamaCppEngine,
) -> None:
    expected = cold(engine, PROMPT, exact=False)
    assert engine.sequences.parking
    others = [engine.sequences.open(exact=False) for _ in range(4)]
    for other in others:
        prefill(engine, other, PROMPT[::-1])
    assert engine.sequences.parking.park(others[0])  # what is parked stays parked
    last = engine.sequences.open(exact=False)
    first = prefill(engine, last, PROMPT)
    for other in others[1:]:
        engine.sequences.close(other)
    cells = engine._pools.default.cells
    assert cells.peak > 3 * cells.used
    said = decode(engine, last, first, 1)
    assert cells.peak == cells.used
    assert [first, *decode(engine, last, said[-1], 11)] == expected
    copy = engine.sequences.open(exact=False)
    engine.sequences.share(others[0], len(PROMPT), copy)
    assert copy.length == len(PROMPT)


@pytest.mark.parametrize("record_bytes", [1 << 16, 0])
def test_a_parked_sequence_continues_whatever_the_estimate_of_its_record(
    engine: LlamaCppEngine, monkeypatch: pytest.MonkeyPatch, record_bytes: int
) -> None:
    monkeypatch.setattr(parking, "_max_record_bytes", lambda _tokens: record_bytes)
    expected = cold(engine, PROMPT, exact=False)
    assert engine.sequences.parking
    parked, into = engine.sequences.open(exact=False), engine.sequences.open(exact=False)
    first = prefill(engine, parked, PROMPT)
    assert engine.sequences.parking.park(parked)
    engine.sequences.share(parked, len(PROMPT), into)
    assert [first, *decode(engine, into, first, 12)][:12] == expected[:12]


def test_sequences_that_share_cells_are_not_compacted(engine: LlamaCppEngine) -> None:
    expected = cold(engine, PROMPT, exact=False)
    assert engine.sequences.parking
    low, one, two = (engine.sequences.open(exact=False) for _ in range(3))
    prefill(engine, low, [*PROMPT, *PROMPT, *PROMPT, *PROMPT])
    first = prefill(engine, one, PROMPT)
    engine.sequences.share(one, len(PROMPT), two)
    engine.sequences.close(low)
    peak = engine._pools.default.cells.peak
    assert decode(engine, two, first, 12) == expected
    assert engine._pools.default.cells.peak == peak
    assert decode(engine, one, first, 12) == expected
