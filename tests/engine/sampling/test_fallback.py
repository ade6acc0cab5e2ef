"""The NumPy sampler draws the tokens that the sorted row allows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.engine.base import Row
from rekindle.engine.sampling.fallback import draw, top_tokens
from rekindle.protocol.requests import SamplingParams
from tests.engine.sampling.reference import probabilities

LOGITS = st.one_of(
    st.integers(-240, 240).map(lambda eighths: eighths / 8),
    st.sampled_from([0.0, 1.0, -2.5, 30.0, float("-inf")]),  # so that some are equal
)
ROWS = st.lists(LOGITS, min_size=1, max_size=40).filter(lambda row: max(row) > float("-inf"))


def random_row(seed: int, size: int, spread: float, *, ties: bool) -> Row:
    row = np.random.default_rng(seed).normal(0, spread, size)
    return (row.round(1) if ties else row).astype(np.float32)


def drawn(row: Row, sampling: SamplingParams) -> set[int]:
    """Draw so hot that every token that is left has about the same probability."""
    uniforms = (np.arange(4 * row.size) + 0.5) / (4 * row.size)
    return {draw(row, sampling, 1e9, uniform) for uniform in uniforms}


@given(ROWS, st.floats(0, 1 - 1e-9), st.sampled_from([0, 1, 5, 100]), st.sampled_from([0, 0.1, 1]))
def test_the_tokens_that_can_be_drawn_are_those_of_the_sorted_row(
    values: list[float], top_p: float, top_k: int, min_p: float
) -> None:
    """Logits are equal or clearly different, so rounding in `exp` cannot decide."""
    row = np.array(values, np.float32)
    sampling = SamplingParams(temperature=1, top_p=top_p, top_k=top_k, min_p=min_p)
    assert drawn(row, sampling) == set(probabilities(row, sampling))


@pytest.mark.parametrize("top_p", [0.0, 0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 4.0])
@pytest.mark.parametrize("ties", [False, True])
def test_the_nucleus_of_a_large_row_is_that_of_the_sorted_row(
    top_p: float, spread: float, ties: bool
) -> None:
    row = random_row(1, 1500, spread, ties=ties)
    sampling = SamplingParams(temperature=1, top_p=top_p)
    assert drawn(row, sampling) == set(probabilities(row, sampling))


@pytest.mark.parametrize("size", [3, 600, 5000])
@pytest.mark.parametrize("count", [1, 2, 40, 700, 4999])
@pytest.mark.parametrize("ties", [False, True])
def test_the_top_tokens_are_those_of_the_sorted_row(size: int, count: int, ties: bool) -> None:
    row = random_row(2, size, 2.0, ties=ties)
    expected = np.argsort(-row, kind="stable")[:count]
    assert top_tokens(row, count).tolist() == expected.tolist()


def test_a_forbidden_token_is_never_among_the_top_tokens() -> None:
    row = np.full(5000, -np.inf, np.float32)
    assert top_tokens(row, 40).size == 0
    row[[7, 4000]] = 1.0
    assert top_tokens(row, 40).tolist() == [7, 4000]


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
@pytest.mark.parametrize("size", [1, 65, 1003])
def test_the_smallest_and_largest_random_numbers_draw_allowed_tokens(
    size: int, uniform: float
) -> None:
    row = random_row(3, size, 2, ties=False)
    row[1:] = np.where(row[1:] < 0, -np.inf, row[1:])
    assert np.isfinite(row[draw(row, SamplingParams(top_p=1), 0.7, uniform)])
