"""What is said of many rows at once holds for each of them."""

from __future__ import annotations

import numpy as np
import pytest

from rekindle.engine.base import Matrix
from rekindle.engine.sampling import fallback as weighted_rows
from rekindle.engine.sampling.fallback import (
    PROPOSALS,
    UNIFORMS,
    Draws,
    Scratch,
    WeightedRows,
    uniforms,
)
from rekindle.protocol.requests import SamplingParams
from tests.engine.sorted_sampling import chances


def make_rows(size: int, spread: float, *, ties: bool = False) -> Matrix:
    rows = np.random.default_rng(size).normal(0, spread, (3, size))
    return (rows.round(1) if ties else rows).astype(np.float32)


@pytest.mark.parametrize("top_p", [0.0, 0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("spread", [0.0, 0.5, 4.0])
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("size", [1, 5, 200])
def test_what_is_surely_in_a_nucleus_is_in_it(
    size: int, top_p: float, spread: float, ties: bool
) -> None:
    logits = make_rows(size, spread, ties=ties)
    rows = WeightedRows(logits, Scratch())
    shares = np.full(len(logits), top_p)
    defined = [set(chances(row, SamplingParams(temperature=1, top_p=top_p))) for row in logits]
    for token in range(size):
        sure = rows.surely_in(np.full(len(logits), token), shares)
        for row in range(len(logits)):
            is_in = token in rows.nucleus(row, top_p)
            assert is_in == (token in defined[row])
            assert is_in or not sure[row]


@pytest.mark.parametrize("exp2", [False, True])
def test_weights_are_exponentials_whatever_computes_them(
    exp2: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weighted_rows, "_EXP2_IS_FAST", exp2)
    logits = np.linspace(-60, 70, 3000, dtype=np.float32).reshape(3, 1000)
    weights = WeightedRows(logits, Scratch()).weights
    assert weights == pytest.approx(np.exp(logits.astype(np.float64)), rel=1e-5)


def test_most_of_a_nucleus_is_seen_at_once() -> None:
    """Or the whole row would be looked at again for each token."""
    for logits in (make_rows(5000, 1), make_rows(5000, 8)):
        rows = WeightedRows(logits, Scratch())
        numbers = uniforms([Draws(seed) for seed in range(len(logits))])
        proposed = rows.propose(np.full(len(logits), 0.8), numbers)
        assert proposed.accepted.mean() > 0.3
        shares = np.full(len(logits), 0.9)
        sure = np.array([rows.surely_in(tokens, shares) for tokens in proposed.tokens.T])
        assert sure.mean() > 0.7


@pytest.mark.parametrize("size", [1, 63, 64, 65, 129, 1003])
@pytest.mark.parametrize("edge", [0.0, 1 - 2**-53])
def test_extreme_numbers_propose_tokens_that_there_are(size: int, edge: float) -> None:
    logits = make_rows(size, 2)
    logits[:, 1:] = np.where(logits[:, 1:] < 0, -np.inf, logits[:, 1:])
    rows = WeightedRows(logits, Scratch())
    numbers = np.full((UNIFORMS, len(logits), PROPOSALS), edge)
    with np.errstate(divide="ignore"):
        tokens = rows.propose(np.full(len(logits), 0.7), numbers).tokens
    assert np.isfinite(np.take_along_axis(logits, tokens, axis=1)).all()


def test_rows_that_float32_cannot_weigh_are_not_usable() -> None:
    logits = np.zeros((5, 100), np.float32)
    logits[1, 3] = 95
    logits[2] = -60
    logits[3, 4] = np.nan
    with np.errstate(all="ignore"):
        usable = WeightedRows(logits, Scratch()).usable
    assert usable.tolist() == [True, False, False, False, True]


def test_numbers_of_a_reply_depend_on_its_seed_and_token_alone() -> None:
    one, other = Draws(1), Draws(2)
    first = uniforms([one, other])
    assert np.array_equal(first[:, 1], uniforms([other])[:, 0])
    one.next_token()
    second = uniforms([one])[:, 0]
    assert not np.intersect1d(first, second).size
    assert first.min() >= 0
    assert first.max() < 1
