"""Every field of SamplingParams has its effect, and a seed determines the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf, nan, sqrt
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rekindle.engine.base import Row
from rekindle.engine.sampling import native
from rekindle.engine.sampling.sampler import TokenSampler, build_step_sampler
from rekindle.protocol.requests import SamplingParams
from tests.engine.sampling.reference import probabilities

pytestmark = pytest.mark.usefixtures("compiled")

ROW = np.array([0.0, 3.0, 2.0, 1.0, -1.0], np.float32)
DRAWS = 4000
TOGETHER = 50  # rows of a step


class Only:
    """Allows some tokens."""

    trouble = None

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.accepted: list[int] = []

    def mask(self, logits: Any) -> None:
        kept = logits[self.tokens]
        logits[:] = -np.inf
        logits[self.tokens] = kept

    def accept(self, token: int) -> None:
        self.accepted.append(token)

    def replay(self, tokens: Sequence[int]) -> None: ...


def tokens(
    sampling: SamplingParams, row: Row = ROW, *, prompt: tuple[int, ...] = (), count: int = 200
) -> list[int]:
    sampler = TokenSampler(sampling, prompt)
    return [sampler.sample(row.copy()).token for _ in range(count)]


def tokens_together(sampling: SamplingParams, row: Row) -> list[int]:
    """Draw `DRAWS` tokens, for replies that are sampled in one step."""
    assert sampling.seed is not None
    seeds = range(sampling.seed * TOGETHER, (sampling.seed + 1) * TOGETHER)
    samplers = [TokenSampler(replace(sampling, seed=seed), ()) for seed in seeds]
    step = build_step_sampler(busy_cores=1)
    steps = [step.sample(samplers, np.tile(row, (TOGETHER, 1))) for _ in range(DRAWS // TOGETHER)]
    return [sampled.token for step in steps for sampled in step]


@pytest.mark.parametrize(
    ("sampling", "left"),
    [
        (SamplingParams(temperature=0), {1}),
        (SamplingParams(temperature=0, logit_bias={4: 10.0}), {4}),
        (SamplingParams(temperature=0, logit_bias={1: -inf}), {2}),
        (SamplingParams(temperature=1, seed=1, top_p=1, top_k=2), {1, 2}),
        (SamplingParams(temperature=1, seed=1, top_p=1, top_k=50), {0, 1, 2, 3, 4}),
        (SamplingParams(temperature=1, seed=1, top_p=0.7), {1, 2}),
        (SamplingParams(temperature=1, seed=1, top_p=0.0), {1}),
        (SamplingParams(temperature=1, seed=1, top_p=1, min_p=0.1), {1, 2, 3}),
        (SamplingParams(temperature=1, seed=1, top_p=1, min_p=1.0), {1}),
        (SamplingParams(temperature=9, seed=1, top_p=1), {0, 1, 2, 3, 4}),
        (SamplingParams(temperature=100, seed=1, top_p=0.7), {1, 2}),
        (SamplingParams(temperature=1e-30, seed=1, top_p=1), {1}),
    ],
    ids=repr,
)
def test_parameters_leave_the_tokens_they_should(sampling: SamplingParams, left: set[int]) -> None:
    assert set(tokens(sampling)) == left


DISTRIBUTIONS = {
    "as the model": SamplingParams(temperature=1, top_p=1, seed=1),
    "cool": SamplingParams(temperature=0.5, top_p=1, seed=2),
    "top p": SamplingParams(temperature=0.8, top_p=0.9, seed=3),
    "top p, cold": SamplingParams(temperature=0.3, top_p=0.6, seed=8),
    "top p, hot": SamplingParams(temperature=3, top_p=0.5, seed=4),
    "top k": SamplingParams(temperature=1, top_p=1, top_k=7, seed=5),
    "min p": SamplingParams(temperature=1.5, top_p=1, min_p=0.1, seed=6),
    "typical p": SamplingParams(temperature=1, top_p=1, typical_p=0.4, seed=10),
    "typical p, min p": SamplingParams(temperature=1, top_p=1, typical_p=0.3, min_p=0.5, seed=11),
    "typical p, hot": SamplingParams(
        temperature=2, top_p=0.7, top_k=100, typical_p=0.6, min_p=0.01, seed=12
    ),
    "all of them": SamplingParams(temperature=1.2, top_p=0.8, top_k=20, min_p=0.02, seed=7),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("spread", [0.0, 1.0, 3.0])
@pytest.mark.parametrize("size", [12, 1300])
def test_tokens_are_drawn_by_their_probabilities(name: str, spread: float, size: int) -> None:
    row = np.random.default_rng(8).normal(0, spread, size).round(1).astype(np.float32)
    assert_drawn_by_probability(row, DISTRIBUTIONS[name])


@pytest.mark.parametrize("top_p", [0.3, 0.5, 0.7])
@pytest.mark.parametrize("temperature", [0.8, 1, 2])
def test_equal_tokens_at_the_edge_of_a_nucleus_are_drawn_by_their_probabilities(
    top_p: float, temperature: float
) -> None:
    """A heavier token is in the nucleus, and some of the equal ones are."""
    row = np.array([0.0] * 4 + [0.7] + [0.0] * 6, np.float32)
    assert_drawn_by_probability(row, SamplingParams(temperature=temperature, top_p=top_p, seed=9))


def assert_drawn_by_probability(row: Row, sampling: SamplingParams) -> None:
    """Compare Pearson's statistic with a bound that one in a million exceeds. Seeds are fixed."""
    expected = probabilities(row, sampling)
    drawn = np.bincount(tokens_together(sampling, row), minlength=row.size)
    assert set(np.flatnonzero(drawn).tolist()) <= set(expected)
    likely = {token for token, chance in expected.items() if DRAWS * chance >= 5}
    cells = [(drawn[token], DRAWS * expected[token]) for token in likely]
    rest = DRAWS * sum(chance for token, chance in expected.items() if token not in likely)
    if rest >= 5:
        cells.append((DRAWS - sum(count for count, _ in cells), rest))
    statistic = sum((count - mean) ** 2 / mean for count, mean in cells)
    assert statistic < len(cells) + 5 * sqrt(2 * len(cells)) + 15


def test_a_reply_follows_its_seed_and_no_other() -> None:
    sampling = SamplingParams(temperature=1, top_p=0.9, seed=7)
    alone = tokens(sampling, count=50)
    one, other = TokenSampler(sampling, ()), TokenSampler(SamplingParams(seed=8), ())
    beside = []
    for _ in range(50):
        beside.append(one.sample(ROW.copy()).token)
        other.sample(ROW.copy())
    assert beside == alone
    assert len(set(alone)) > 1
    assert tokens(SamplingParams(temperature=1, top_p=0.9, seed=-7), count=50) != alone
    assert tokens(SamplingParams(temperature=1, top_p=0.9), count=50) != tokens(
        SamplingParams(temperature=1, top_p=0.9), count=50
    )


def test_a_draw_depends_on_the_position_and_not_on_earlier_tokens() -> None:
    sampling = SamplingParams(temperature=5, top_p=0.9, seed=7)
    certain = np.array([0.0, 90.0, 0.0, 0.0, 0.0], np.float32)
    one, other = TokenSampler(sampling, ()), TokenSampler(sampling, ())
    for _ in range(20):
        one.sample(ROW.copy())
        other.sample(certain.copy())
    later = [[each.sample(ROW.copy()).token for _ in range(30)] for each in (one, other)]
    assert later[0] == later[1]


def test_penalties_avoid_tokens_of_the_reply() -> None:
    presence = SamplingParams(temperature=0, presence_penalty=1.5)
    assert tokens(presence, count=3) == [1, 2, 1]
    frequency = SamplingParams(temperature=0, frequency_penalty=2.0)
    assert set(tokens(frequency, count=6)) == {0, 1, 2, 3}
    repetition = SamplingParams(temperature=0, repetition_penalty=2.0)
    assert tokens(repetition, prompt=(1,), count=1) == [2]


def test_the_repetition_penalty_forgets_tokens_that_left_its_window() -> None:
    sampling = SamplingParams(temperature=0, repetition_penalty=4.0, repetition_context_size=2)
    assert tokens(sampling, prompt=(1, 0, 0), count=1) == [1]
    assert tokens(sampling, prompt=(1, 0), count=5) == [2, 1, 3, 2, 1]
    unbound = SamplingParams(temperature=0, repetition_penalty=4.0, repetition_context_size=0)
    assert tokens(unbound, prompt=(1,), count=2) == [1, 1]


def test_the_repetition_penalty_lowers_negative_logits_too() -> None:
    row = np.array([-1.0, -1.5], np.float32)
    sampling = SamplingParams(temperature=0, repetition_penalty=2.0)
    assert tokens(sampling, row, prompt=(0,), count=1) == [1]


def test_occurrences_of_many_tokens_are_counted() -> None:
    row = np.arange(300, dtype=np.float32)
    sampling = SamplingParams(temperature=0, presence_penalty=1000.0)
    assert tokens(sampling, row, count=300) == list(range(299, -1, -1))


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0), SamplingParams(seed=1)])
def test_a_mask_limits_the_choice_and_is_told_the_token(sampling: SamplingParams) -> None:
    mask = Only([0, 4])
    sampler = TokenSampler(sampling, (), mask)
    drawn = [sampler.sample(ROW.copy()).token for _ in range(50)]
    assert set(drawn) <= {0, 4}
    assert mask.accepted == drawn


@pytest.mark.parametrize(
    ("row", "token"),
    [
        ([-inf, -inf, -inf], 0),
        ([nan, nan, nan], 0),
        ([0.0, nan, 2.0], 2),
        ([nan, nan, 2.0], 2),
        ([-inf, nan, -inf], 1),
        ([0.0, inf, 2.0], 1),
        ([0.0, -3.4e38, 200.0], 2),
    ],
    ids=str,
)
@pytest.mark.parametrize("temperature", [0, 0.8])
@pytest.mark.parametrize("top_k", [0, 2])
def test_a_row_of_nan_or_infinity_still_gives_a_token(
    row: list[float], token: int, top_k: int, temperature: float
) -> None:
    sampling = SamplingParams(temperature=temperature, top_k=top_k, seed=1)
    assert tokens(sampling, np.array(row, np.float32), count=3) == [token] * 3


def test_logprobs_are_the_models_own() -> None:
    """Before mask, bias and penalties."""
    biased = SamplingParams(temperature=0, logit_bias={4: 10.0}, top_logprobs=2)
    sampled = TokenSampler(biased, (), Only([4])).sample(ROW.copy())
    expected = ROW - np.log(np.exp(ROW).sum())
    assert sampled.token == 4
    assert sampled.logprob == pytest.approx(expected[4], abs=1e-6)
    assert [token for token, _ in sampled.top] == [1, 2]
    assert [score for _, score in sampled.top] == pytest.approx(expected[[1, 2]].tolist(), abs=1e-6)
    own = TokenSampler(SamplingParams(temperature=0, top_logprobs=0), ()).sample(ROW.copy())
    assert own.logprob is not None
    assert own.top == ()


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=1, top_p=0.9, seed=3),
        SamplingParams(temperature=0, repetition_penalty=1.3),
        SamplingParams(temperature=0.7, seed=1, presence_penalty=1.5, frequency_penalty=0.5),
    ],
)
def test_replay_continues_a_reply_and_forgets_later_tokens(
    sampling: SamplingParams,
) -> None:
    rows = np.random.default_rng(1).standard_normal((12, 50)).astype(np.float32)
    sampler = TokenSampler(sampling, range(40))
    reply = [sampler.sample(row.copy()).token for row in rows]
    sampler.replay(reply[:5])
    assert [sampler.sample(row.copy()).token for row in rows[5:]] == reply[5:]


def test_a_seed_gives_the_same_tokens_in_every_version() -> None:
    """Compiled code draws these tokens since the first version."""
    if native.load() is None:
        return  # NumPy draws other tokens
    row = (3 * np.random.default_rng(1).standard_normal(2000)).astype(np.float32)
    for sampling, expected in (
        (SamplingParams(seed=1), [860, 860, 860, 1408, 1705, 860, 1408, 860]),
        (
            SamplingParams(seed=2, temperature=1.5, top_p=0.95, min_p=0.01),
            [860, 273, 1564, 1564, 1595, 860, 1705, 1823],
        ),
        (
            SamplingParams(seed=3, top_k=40, temperature=1.2),
            [860, 860, 1947, 1781, 1020, 860, 860, 860],
        ),
        (
            SamplingParams(
                seed=4, temperature=1, top_p=1, repetition_penalty=1.3, presence_penalty=0.5
            ),
            [889, 1564, 1408, 1020, 860, 1947, 1649, 989],
        ),
    ):
        assert tokens(sampling, row, prompt=tuple(range(50)), count=8) == expected


def test_a_greedy_choice_is_made_among_the_typical_tokens() -> None:
    """The highest of many nearly equal tokens tells less than the average one."""
    row = np.array([3.0] + [0.0] * 60 + [-9.0], np.float32)
    assert tokens(SamplingParams(temperature=0), row, count=2) == [0, 0]
    assert tokens(SamplingParams(temperature=0, typical_p=0.3), row, count=2) == [1, 1]
    assert tokens(SamplingParams(temperature=0, typical_p=0.99), row, count=2) == [0, 0]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(
    st.lists(st.integers(-24, 24), min_size=1, max_size=60, unique=True),
    st.floats(0.01, 0.99),
    st.sampled_from([0, 5]),
)
def test_the_typical_tokens_are_those_of_the_sorted_row(
    eighths: list[int], share: float, top_k: int
) -> None:
    row = np.array(eighths, np.float32) / np.float32(8)
    sampling = SamplingParams(temperature=1e9, top_p=1, top_k=top_k, typical_p=share, seed=1)
    drawn = set(tokens(sampling, row, count=40))
    assert drawn <= set(probabilities(row, sampling))
