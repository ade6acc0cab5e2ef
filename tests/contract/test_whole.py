"""Engines whose state cannot be truncated resume from checkpoints only."""

from __future__ import annotations

import pytest

from rekindle.engine.base import Engine, Sequence
from rekindle.errors import CorruptBlock, EngineBroken
from tests.contract.actions import PROMPT, answer, cold, prefill
from tests.contract.engines import whole_engines

pytestmark = whole_engines


def export(engine: Engine, sequence: Sequence) -> list[tuple[bytes, int, bool]]:
    """Export a sequence in blocks, the last one with a checkpoint."""
    size = engine.capabilities.block_tokens
    found = []
    for start in range(0, sequence.length, size):
        stop = min(start + size, sequence.length)
        last = stop == sequence.length
        blob = bytes(engine.sequences.export(sequence, start, stop, resumable=last))
        found.append((blob, stop - start, last))
    return found


def restored(engine: Engine, exported: list[tuple[bytes, int, bool]], *, exact: bool) -> Sequence:
    sequence = engine.sequences.open(exact=exact)
    for blob, tokens, last in exported:
        engine.sequences.restore(sequence, blob, tokens, resumable=last)
    return sequence


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 100, 149])
@pytest.mark.parametrize("exact", [False, True])
def test_a_restored_sequence_continues_like_the_original(
    engine: Engine, tokens: int, exact: bool
) -> None:
    source = engine.sequences.open(exact=exact)
    prefill(engine, source, PROMPT[:tokens])
    again = restored(engine, export(engine, source), exact=exact)
    assert again.length == tokens
    assert answer(engine, again, PROMPT) == answer(engine, source, PROMPT)


def test_later_blocks_work_with_an_earlier_checkpoint(engine: Engine) -> None:
    """The cells of a block do not change. Only the checkpoint belongs to one moment."""
    step = engine.capabilities.step_tokens
    expected = cold(engine, PROMPT)
    source = engine.sequences.open(exact=True)
    prefill(engine, source, PROMPT[:step])
    exported = export(engine, source)
    prefill(engine, source, PROMPT)
    size = engine.capabilities.block_tokens
    later = [
        (bytes(engine.sequences.export(source, start, start + size)), size, False)
        for start in range(0, step, size)
    ]
    cells = len(later[-1][0])
    assert exported[-1][0][:cells] == later[-1][0]
    assert len(exported[-1][0]) == cells + engine.capabilities.kv_layout.checkpoint_bytes
    again = restored(engine, [*later[:-1], exported[-1]], exact=True)
    assert answer(engine, again, PROMPT) == expected


def test_restoring_does_not_affect_other_sequences(engine: Engine) -> None:
    other = [9, 8, 7, *PROMPT[:40]]
    expected = cold(engine, other, exact=False)
    neighbour = engine.sequences.open(exact=False)
    prefill(engine, neighbour, other[:20])
    source = engine.sequences.open(exact=False)
    prefill(engine, source, PROMPT)
    again = restored(engine, export(engine, source), exact=False)
    engine.sequences.close(source)
    assert answer(engine, neighbour, other) == expected
    assert answer(engine, again, [*PROMPT, 5]) == cold(engine, [*PROMPT, 5], exact=False)


def test_a_sequence_is_shared_whole(engine: Engine) -> None:
    expected = cold(engine, PROMPT, exact=False)
    source, into = engine.sequences.open(exact=False), engine.sequences.open(exact=False)
    prefill(engine, source, PROMPT[:100])
    with pytest.raises(ValueError, match="whole"):
        engine.sequences.share(source, 99, into)
    engine.sequences.share(source, 100, into)
    prefill(engine, source, [*PROMPT[:100], 4, 4, 4])
    engine.sequences.close(source)
    assert answer(engine, into, PROMPT) == expected


def test_a_sequence_can_be_emptied_and_reused(engine: Engine) -> None:
    sequence = engine.sequences.open(exact=False)
    prefill(engine, sequence, PROMPT[:50])
    engine.sequences.truncate(sequence, 0)
    assert sequence.length == 0
    assert answer(engine, sequence, PROMPT) == cold(engine, PROMPT, exact=False)


def test_a_block_without_its_checkpoint_is_refused(engine: Engine) -> None:
    source, into = engine.sequences.open(exact=False), engine.sequences.open(exact=False)
    prefill(engine, source, PROMPT[:10])
    blob = engine.sequences.export(source, 0, 10)
    with pytest.raises(CorruptBlock):
        engine.sequences.restore(into, blob, 10, resumable=True)
    assert into.length == 0


def test_a_checkpoint_exists_only_at_the_end(engine: Engine) -> None:
    source = engine.sequences.open(exact=False)
    prefill(engine, source, PROMPT[:10])
    with pytest.raises((ValueError, AssertionError)):
        engine.sequences.export(source, 0, 9, resumable=True)


def test_after_a_wrong_checkpoint_the_engine_still_works(
    engine: Engine,
) -> None:
    """Some engines notice after the cells are restored, and start again empty. Others notice
    before."""
    expected = cold(engine, PROMPT, exact=False)
    source, into = engine.sequences.open(exact=False), engine.sequences.open(exact=False)
    prefill(engine, source, PROMPT[:30])
    before = bytes(engine.sequences.export(source, 0, 30, resumable=True))
    prefill(engine, source, PROMPT[:40])
    after = bytes(engine.sequences.export(source, 0, 40, resumable=True))
    cut = -engine.capabilities.kv_layout.checkpoint_bytes
    with pytest.raises((EngineBroken, CorruptBlock)) as raised:
        engine.sequences.restore(into, after[:cut] + before[cut:], 40, resumable=True)
    held = 40 if raised.type is CorruptBlock else 0
    assert engine.sequences.free_tokens() == engine.capabilities.pool_tokens - held
    assert cold(engine, PROMPT, exact=False) == expected
