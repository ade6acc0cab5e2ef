"""Engines whose state can be truncated keep these promises."""

from __future__ import annotations

from rekindle.engine.base import Engine
from tests.contract.actions import PROMPT, answer, blocks, cold, prefill
from tests.contract.engines import truncating_engines

pytestmark = truncating_engines


def test_restored_blocks_give_the_same_reply_as_computed_ones(engine: Engine) -> None:
    step = engine.capabilities.step_tokens
    reusable = (len(PROMPT) - 1) // step * step
    first = engine.sequences.open(exact=True)
    expected = answer(engine, first, PROMPT)
    exported = blocks(engine, first, reusable)
    second = engine.sequences.open(exact=True)
    for blob in exported:
        engine.sequences.restore(second, blob, engine.capabilities.block_tokens)
    assert second.length == reusable
    assert answer(engine, second, PROMPT) == expected


def test_blocks_move_between_shared_and_exact_sequences(engine: Engine) -> None:
    size = engine.capabilities.block_tokens
    shared = engine.sequences.open(exact=False)
    prefill(engine, shared, PROMPT[:size])
    blob = engine.sequences.export(shared, 0, size)
    exact = engine.sequences.open(exact=True)
    engine.sequences.restore(exact, blob, size)
    assert exact.length == size
    back = engine.sequences.open(exact=False)
    engine.sequences.restore(back, engine.sequences.export(exact, 0, size), size)
    assert engine.sequences.export(back, 0, size) == blob


def test_a_shared_prefix_takes_no_cells_if_the_engine_shares_them(engine: Engine) -> None:
    source = engine.sequences.open(exact=False)
    prefill(engine, source, PROMPT)
    free = engine.sequences.free_tokens()
    into = engine.sequences.open(exact=False)
    engine.sequences.share(source, 100, into)
    assert into.length == 100
    assert engine.sequences.free_tokens() == free - copied(engine, 100)


def copied(engine: Engine, tokens: int) -> int:
    """Return the number of cells that sharing costs."""
    return 0 if engine.capabilities.shares_cells else tokens


def test_a_sharer_outlives_its_source(engine: Engine) -> None:
    expected = cold(engine, PROMPT, exact=False)
    source = engine.sequences.open(exact=False)
    prefill(engine, source, PROMPT)
    into = engine.sequences.open(exact=False)
    engine.sequences.share(source, 128, into)
    engine.sequences.close(source)
    assert answer(engine, into, PROMPT) == expected


def test_a_truncated_sequence_continues_as_if_never_longer(engine: Engine) -> None:
    step = engine.capabilities.step_tokens
    other = PROMPT[:step] + [9] * 30
    expected = cold(engine, other)
    sequence = engine.sequences.open(exact=True)
    prefill(engine, sequence, PROMPT)
    engine.sequences.truncate(sequence, step)
    assert sequence.length == step
    assert answer(engine, sequence, other) == expected


def test_closing_frees_all_cells(engine: Engine) -> None:
    before = engine.sequences.free_tokens()
    one, two = engine.sequences.open(exact=False), engine.sequences.open(exact=False)
    prefill(engine, one, PROMPT)
    engine.sequences.share(one, 77, two)
    prefill(engine, two, [*PROMPT[:77], 5, 6, 7])
    more = copied(engine, 77)
    assert engine.sequences.free_tokens() == before - len(PROMPT) - 3 - more
    assert engine.sequences.freed_tokens([]) == 0
    assert engine.sequences.freed_tokens([one]) == len(PROMPT) - 77 + more
    assert engine.sequences.freed_tokens([one, two]) == len(PROMPT) + 3 + more
    engine.sequences.close(one)
    assert engine.sequences.free_tokens() == before - 80
    engine.sequences.close(two)
    assert engine.sequences.free_tokens() == before
