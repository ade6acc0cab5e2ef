"""What every engine promises, whatever is behind it."""

from __future__ import annotations

import pytest

from rekindle.engine.base import Engine, Sampler, Sequence, Work
from rekindle.engine.sampling import Sampling
from rekindle.errors import CorruptBlock, PoolFull
from tests.contract.engines import every_engine

GREEDY = Sampling(temperature=0)
PROMPT = [3 + (7 * n) % 200 for n in range(150)]

pytestmark = every_engine


def prefill(engine: Engine, sequence: Sequence, tokens: list[int]) -> int:
    """Append in canonical steps and choose the next token."""
    step = engine.abilities.step_tokens
    sampler = engine.sampler(GREEDY, tokens)
    sampled = None
    start = sequence.length
    while start < len(tokens):
        stop = min(start - start % step + step, len(tokens))
        last = stop == len(tokens)
        [sampled] = engine.step([Work(sequence, tokens[start:stop], sampler if last else None)])
        start = stop
    sampler.close()
    assert sampled is not None
    return sampled.token


def decode(engine: Engine, sequence: Sequence, token: int, count: int) -> list[int]:
    sampler: Sampler = engine.sampler(GREEDY, [])
    tokens = [token]
    for _ in range(count):
        [sampled] = engine.step([Work(sequence, [tokens[-1]], sampler)])
        assert sampled is not None
        tokens.append(sampled.token)
    sampler.close()
    return tokens


def answer(engine: Engine, sequence: Sequence, tokens: list[int]) -> list[int]:
    return decode(engine, sequence, prefill(engine, sequence, tokens), 12)


def cold(engine: Engine, tokens: list[int], *, exact: bool = True) -> list[int]:
    sequence = engine.open(exact=exact)
    said = answer(engine, sequence, tokens)
    engine.close_sequence(sequence)
    return said


def blocks(engine: Engine, sequence: Sequence, stop: int) -> list[bytes]:
    size = engine.abilities.block_tokens
    return [engine.export(sequence, start, start + size) for start in range(0, stop, size)]


def test_the_same_tokens_give_the_same_answer(engine: Engine) -> None:
    assert cold(engine, PROMPT) == cold(engine, PROMPT)


def test_restored_blocks_answer_as_computed_ones(engine: Engine) -> None:
    step = engine.abilities.step_tokens
    reusable = (len(PROMPT) - 1) // step * step
    first = engine.open(exact=True)
    expected = answer(engine, first, PROMPT)
    exported = blocks(engine, first, reusable)
    second = engine.open(exact=True)
    for blob in exported:
        engine.restore(second, blob, engine.abilities.block_tokens)
    assert second.length == reusable
    assert answer(engine, second, PROMPT) == expected


def test_blocks_move_between_shared_and_exact_sequences(engine: Engine) -> None:
    size = engine.abilities.block_tokens
    shared = engine.open(exact=False)
    prefill(engine, shared, PROMPT[:size])
    blob = engine.export(shared, 0, size)
    exact = engine.open(exact=True)
    engine.restore(exact, blob, size)
    assert exact.length == size
    back = engine.open(exact=False)
    engine.restore(back, engine.export(exact, 0, size), size)
    assert engine.export(back, 0, size) == blob


def test_a_shared_prefix_costs_no_cells(engine: Engine) -> None:
    source = engine.open(exact=False)
    prefill(engine, source, PROMPT)
    free = engine.free_tokens
    into = engine.open(exact=False)
    engine.share(source, 100, into)
    assert into.length == 100
    assert engine.free_tokens == free


def test_a_sharer_outlives_its_source(engine: Engine) -> None:
    expected = cold(engine, PROMPT, exact=False)
    source = engine.open(exact=False)
    prefill(engine, source, PROMPT)
    into = engine.open(exact=False)
    engine.share(source, 128, into)
    engine.close_sequence(source)
    assert answer(engine, into, PROMPT) == expected


def test_sharing_into_a_used_sequence_is_refused(engine: Engine) -> None:
    source, into = engine.open(exact=False), engine.open(exact=False)
    prefill(engine, source, PROMPT[:20])
    prefill(engine, into, PROMPT[:10])
    with pytest.raises(ValueError, match="empty"):
        engine.share(source, 10, into)


def test_a_cut_sequence_goes_on_as_if_never_longer(engine: Engine) -> None:
    step = engine.abilities.step_tokens
    other = PROMPT[:step] + [9] * 30
    expected = cold(engine, other)
    sequence = engine.open(exact=True)
    prefill(engine, sequence, PROMPT)
    engine.cut(sequence, step)
    assert sequence.length == step
    assert answer(engine, sequence, other) == expected


def test_closing_gives_all_cells_back(engine: Engine) -> None:
    before = engine.free_tokens
    one, two = engine.open(exact=False), engine.open(exact=False)
    prefill(engine, one, PROMPT)
    engine.share(one, 77, two)
    prefill(engine, two, [*PROMPT[:77], 5, 6, 7])
    assert engine.free_tokens == before - len(PROMPT) - 3
    engine.close_sequence(one)
    assert engine.free_tokens == before - 80
    engine.close_sequence(two)
    assert engine.free_tokens == before


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
        (False, engine.abilities.sequences),
        (True, engine.abilities.exact_sequences),
    ):
        for _ in range(most):
            engine.open(exact=exact)
        with pytest.raises(PoolFull):
            engine.open(exact=exact)


def test_a_full_pool_changes_nothing(engine: Engine) -> None:
    abilities = engine.abilities
    keeper = engine.open(exact=False)
    prefill(engine, keeper, PROMPT[:20])
    while engine.free_tokens >= abilities.batch_tokens:
        filler = engine.open(exact=False)
        room = min(engine.free_tokens, abilities.context_tokens) // abilities.batch_tokens
        for _ in range(room):
            engine.step([Work(filler, [5] * abilities.batch_tokens, None)])
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
    size = engine.abilities.block_tokens
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
