"""Engines that park idle sequences keep these promises."""

from __future__ import annotations

import pytest

from rekindle.engine.base import Engine, Parking, Sequence
from rekindle.errors import PoolFull
from tests.contract.actions import PROMPT, answer, cold, decode, prefill
from tests.contract.engines import PARK_TOKENS, parking_engines

pytestmark = parking_engines


def parking_of(engine: Engine) -> Parking:
    assert engine.sequences.parking is not None
    assert engine.sequences.parking.tokens == PARK_TOKENS
    return engine.sequences.parking


def computed(engine: Engine, tokens: list[int]) -> Sequence:
    sequence = engine.sequences.open(exact=False)
    prefill(engine, sequence, tokens)
    return sequence


def test_a_parked_sequence_holds_no_cells(engine: Engine) -> None:
    free = engine.sequences.free_tokens()
    sequence = computed(engine, PROMPT)
    assert parking_of(engine).park(sequence)
    assert sequence.is_parked
    assert sequence.length == len(PROMPT)
    assert engine.sequences.free_tokens() == free
    assert engine.sequences.freed_tokens([sequence]) == 0


def test_a_copy_of_a_parked_sequence_gives_the_same_reply(engine: Engine) -> None:
    expected = cold(engine, PROMPT, exact=False)
    sequence, into = engine.sequences.open(exact=False), engine.sequences.open(exact=False)
    first = prefill(engine, sequence, PROMPT)
    parking_of(engine).park(sequence)
    cold(engine, PROMPT[::-1], exact=False)  # others use its cells meanwhile
    engine.sequences.share(sequence, len(PROMPT), into)
    assert decode(engine, into, first, 12) == expected


def test_a_copy_exports_the_same_bytes(engine: Engine) -> None:
    sequence, into = computed(engine, PROMPT), engine.sequences.open(exact=False)
    size = engine.capabilities.block_tokens
    before = engine.sequences.export(sequence, size, 2 * size)
    parking_of(engine).park(sequence)
    engine.sequences.share(sequence, len(PROMPT), into)
    assert engine.sequences.export(into, size, 2 * size) == before


@pytest.mark.parametrize("tokens", [1, 100, len(PROMPT)])
def test_a_parked_sequence_can_be_shared(engine: Engine, tokens: int) -> None:
    other = [*PROMPT[:tokens], *PROMPT[:50]]
    expected = cold(engine, other, exact=False)
    source = computed(engine, PROMPT)
    parking_of(engine).park(source)
    for _ in range(2):
        free = engine.sequences.free_tokens()
        into = engine.sequences.open(exact=False)
        engine.sequences.share(source, tokens, into)
        assert into.length == tokens
        assert engine.sequences.free_tokens() == free - tokens
        assert answer(engine, into, other) == expected
        engine.sequences.close(into)
    assert source.is_parked


def test_a_copy_outlives_its_parked_source(engine: Engine) -> None:
    expected = cold(engine, PROMPT, exact=False)
    source, into = computed(engine, PROMPT), engine.sequences.open(exact=False)
    parking_of(engine).park(source)
    engine.sequences.share(source, 120, into)
    engine.sequences.close(source)
    assert answer(engine, into, PROMPT) == expected


def test_parking_is_limited_by_its_tokens(engine: Engine) -> None:
    parking = parking_of(engine)
    one, two, three = (computed(engine, PROMPT) for _ in range(3))
    assert parking.park(one)
    assert parking.park(two)
    assert not parking.park(three)
    assert not three.is_parked
    engine.sequences.close(one)
    assert parking.park(three)
    assert parking.park(computed(engine, PROMPT[:100]))
    assert two.is_parked


def test_a_parked_sequence_that_does_not_fit_is_not_copied(engine: Engine) -> None:
    parking, sequence = parking_of(engine), computed(engine, PROMPT)
    parking.park(sequence)
    while engine.sequences.free_tokens() >= len(PROMPT):
        computed(engine, PROMPT)
    with pytest.raises(PoolFull):
        engine.sequences.share(sequence, 10, engine.sequences.open(exact=False))
    engine.sequences.close(sequence)


def test_a_reset_forgets_parked_sequences(engine: Engine) -> None:
    expected = cold(engine, PROMPT, exact=False)
    for _ in range(2):
        assert parking_of(engine).park(computed(engine, PROMPT))
    engine.sequences.reset()
    sequences = [computed(engine, PROMPT) for _ in range(2)]
    assert all(parking_of(engine).park(sequence) for sequence in sequences)
    assert cold(engine, PROMPT, exact=False) == expected
