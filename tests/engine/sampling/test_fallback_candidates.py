"""What is selected without sorting is what sorting would select."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.engine.base import Row
from rekindle.engine.sampling.fallback import Nucleus, largest, pick
from rekindle.protocol.requests import SamplingParams
from tests.engine.sorted_sampling import chances

LOGITS = st.one_of(
    st.floats(-30, 30, width=32),
    st.sampled_from([0.0, 1.0, -2.5, 30.0, -200.0, float("-inf")]),  # so that some are equal
)
ROWS = st.lists(LOGITS, min_size=1, max_size=60).filter(lambda row: max(row) > float("-inf"))


def as_row(values: list[float]) -> Row:
    return np.array(values, np.float32)


def random_row(seed: int, size: int, spread: float, *, ties: bool) -> Row:
    row = np.random.default_rng(seed).normal(0, spread, size)
    return (row.round(1) if ties else row).astype(np.float32)


def nucleus_of(row: Row, top_p: float) -> set[int]:
    """Of all, and again of those that are not too light."""
    weights = np.exp(row - row.max())
    nucleus = Nucleus(weights, top_p)
    found = {token for token in range(row.size) if token in nucleus}
    left = np.flatnonzero(weights >= nucleus.floor)
    nucleus.keep(left)
    assert found == {int(token) for place, token in enumerate(left) if place in nucleus}
    return found


def defined_nucleus(row: Row, top_p: float) -> set[int]:
    return set(chances(row, SamplingParams(temperature=1, top_p=top_p)))


@given(ROWS, st.floats(0, 1 - 1e-9))  # nearer to 1 than that it is up to the rounding of float64
def test_a_nucleus_is_that_of_the_sorted_row(values: list[float], top_p: float) -> None:
    row = as_row(values)
    assert nucleus_of(row, top_p) == defined_nucleus(row, top_p)


@pytest.mark.parametrize("top_p", [0.0, 0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 4.0])
@pytest.mark.parametrize("ties", [False, True])
def test_a_nucleus_of_many_is_that_of_the_sorted_row(
    top_p: float, spread: float, ties: bool
) -> None:
    row = random_row(1, 1500, spread, ties=ties)
    assert nucleus_of(row, top_p) == defined_nucleus(row, top_p)


def test_a_share_that_equal_weights_reach_exactly_takes_the_first_of_them() -> None:
    row = np.zeros(10, np.float32)
    assert nucleus_of(row, 0.5) == {0, 1, 2, 3, 4}
    assert nucleus_of(row, 0.9) == set(range(9))


def test_a_border_that_float32_cannot_tell_is_told() -> None:
    weights = np.exp(random_row(3, 3000, 0.5, ties=False))
    weights /= weights.max()
    order = np.argsort(-weights, kind="stable")
    sums = np.cumsum(weights[order], dtype=np.float64)
    for rank in (10, 1000, 2900):
        for nudge, is_inside in ((1 + 1e-12, True), (1 - 1e-12, False)):
            share = float(sums[rank] / sums[-1]) * nudge
            assert (int(order[rank + 1]) in Nucleus(weights, share)) == is_inside


def test_what_is_outside_takes_with_it_what_comes_after() -> None:
    weights = np.array([0.5, 1.0, 0.2, 0.5, 0.1], np.float32)
    nucleus = Nucleus(weights, 0.6)
    assert 3 not in nucleus
    left = nucleus.without(3, np.ones(5, np.float32))
    assert left.tolist() == [1, 1, 0, 0, 0]


@pytest.mark.parametrize("size", [3, 600, 5000])
@pytest.mark.parametrize("count", [1, 2, 40, 700, 4999])
@pytest.mark.parametrize("ties", [False, True])
def test_the_largest_are_those_of_the_sorted_row(size: int, count: int, ties: bool) -> None:
    row = random_row(2, size, 2.0, ties=ties)
    expected = np.sort(np.argsort(-row, kind="stable")[:count])
    assert largest(row, count).tolist() == expected.tolist()


def test_minus_infinity_is_never_among_the_largest() -> None:
    row = np.full(5000, -np.inf, np.float32)
    assert largest(row, 40).size == 0
    row[[7, 4000]] = 1.0
    assert largest(row, 40).tolist() == [7, 4000]


@given(
    st.lists(st.sampled_from([0.0, 0.0, 1.0, 1e-7, 0.3]), min_size=1, max_size=1200),
    st.floats(0, 1, exclude_max=True),
)
def test_nothing_without_a_chance_is_picked(values: list[float], uniform: float) -> None:
    row = as_row([*values, 1.0])
    assert row[pick(row, uniform)] > 0


def test_picks_go_by_running_sums() -> None:
    row = np.ones(2000, np.float32)
    assert [pick(row, at / 2000 + 1e-6) for at in (0, 511, 512, 1999)] == [0, 511, 512, 1999]
    assert pick(row, 1 - 2**-53) == 1999
