"""What every engine promises, whatever is behind it."""

from __future__ import annotations

import pytest

from rekindle.engine.base import Engine, Work
from rekindle.errors import CorruptBlock, PoolFull
from tests.contract.actions import GREEDY, PROMPT, cold, decode, prefill
from tests.contract.engines import every_engine

pytestmark = every_engine


def test_the_same_tokens_give_the_same_answer(engine: Engine) -> None:
    assert cold(engine, PROMPT) == cold(engine, PROMPT)


def test_sharing_into_a_used_sequence_is_refused(engine: Engine) -> None:
    source, into = engine.open(exact=False), engine.open(exact=False)
    prefill(engine, source, PROMPT[:20])
    prefill(engine, into, PROMPT[:10])
    with pytest.raises(ValueError, match="empty"):
        engine.share(source, 10, into)


def test_several_sequences_are_computed_in_one_step(engine: Engine) -> None:
    sequences = [engine.open(exact=False) for _ in range(3)]
    work = [
        Work(sequence, PROMPT[:10], engine.sampler(GREEDY, PROMPT[:10])) for sequence in sequences
    ]
    first, second, third = engine.step(work)
    assert first is not None
    assert first == second == third
    assert [sequence.length for sequence in sequences] == [10, 10, 10]


def test_no_more_sequences_open_than_there_are(engine: Engine) -> None:
    for exact, most in (
        (False, engine.capabilities.sequences),
        (True, engine.capabilities.exact_sequences),
    ):
        for _ in range(most):
            engine.open(exact=exact)
        with pytest.raises(PoolFull):
            engine.open(exact=exact)


def test_a_full_pool_changes_nothing(engine: Engine) -> None:
    capabilities = engine.capabilities
    keeper = engine.open(exact=False)
    prefill(engine, keeper, PROMPT[:20])
    while engine.free_tokens >= capabilities.batch_tokens:
        filler = engine.open(exact=False)
        room = min(engine.free_tokens, capabilities.context_tokens) // capabilities.batch_tokens
        for _ in range(room):
            engine.step([Work(filler, [5] * capabilities.batch_tokens, None)])
    free = engine.free_tokens
    with pytest.raises(PoolFull):
        engine.step([Work(keeper, [5] * (free + 1), None)])
    assert engine.free_tokens == free
    assert keeper.length == 20
    assert len(decode(engine, keeper, 5, 3)) == 4


@pytest.mark.parametrize("change", [b"", b"x", None], ids=["empty", "longer", "shorter"])
def test_a_block_of_the_wrong_length_never_reaches_the_engine(
    engine: Engine, change: bytes | None
) -> None:
    size = engine.capabilities.block_tokens
    sequence = engine.open(exact=False)
    prefill(engine, sequence, PROMPT)
    blob = engine.export(sequence, 0, size)
    bad = {b"": b"", b"x": blob + b"x", None: blob[:-1]}[change]
    into = engine.open(exact=False)
    free = engine.free_tokens
    with pytest.raises(CorruptBlock):
        engine.restore(into, bad, size)
    assert (into.length, engine.free_tokens) == (0, free)
    engine.restore(into, blob, size)


def test_a_reset_engine_starts_empty_and_works(engine: Engine) -> None:
    expected = cold(engine, PROMPT)
    total = engine.free_tokens
    prefill(engine, engine.open(exact=False), PROMPT)
    engine.open(exact=True)
    engine.reset()
    assert engine.free_tokens == total
    assert cold(engine, PROMPT) == expected
