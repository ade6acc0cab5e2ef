"""Draws a token from one row of logits with NumPy.

`native.py` does this work where the package was built with a C compiler. This module serves the
other installations, and the rows that the compiled code leaves undecided. Both draw from the same
distribution. They agree on greedy tokens, but not on the tokens that they draw for a seed.
"""

from __future__ import annotations

from math import log
from typing import Any

import numpy as np

from rekindle.engine.base import Row
from rekindle.protocol.requests import SamplingParams

Ids = np.ndarray[Any, np.dtype[np.int64]]
Scores = np.ndarray[Any, np.dtype[np.float64]]


def highest(row: Row) -> int:
    """Return the first token with the highest logit.

    NaN comes from a numerical fault in the model. It ranks below every number, but above minus
    infinity, because a mask forbids those tokens.
    """
    token = int(row.argmax())  # the first NaN, if there is one
    if np.isnan(row[token]):
        token = int(np.where(np.isnan(row), np.finfo(row.dtype).min, row).argmax())
    return token


def top_tokens(row: Row, count: int) -> Ids:
    """Return the `count` tokens with the highest logits, best first.

    Ties go to the lower token id. Tokens with a logit of minus infinity are left out.
    """
    values = row
    groups = max(512, 4 * count)
    if row.size >= 4 * groups:
        # `count` groups have a maximum that reaches the floor, so at least `count` tokens do.
        # Selecting among the maxima takes a fraction of the time of selecting in the row.
        depth = row.size // groups
        values = row[: depth * groups].reshape(depth, groups).max(axis=0)
    floor = np.partition(values, -count)[-count] if count < values.size else -np.inf
    candidates = np.flatnonzero(row >= floor if floor > -np.inf else row > floor)
    return candidates[np.argsort(-row[candidates], kind="stable")[:count]]


def draw(row: Row, sampling: SamplingParams, temperature: float, uniform: float) -> int:
    """Draw a token with top-k, typical-p, top-p, min-p and temperature, by a number in [0, 1).

    `temperature` replaces that of `sampling`, which may be too low to divide by.
    """
    peak = row.max()
    if not np.isfinite(peak):  # every token is forbidden, or the model computed NaN or infinity
        return highest(row)
    if 0 < sampling.top_k < row.size:
        tokens = np.sort(top_tokens(row, sampling.top_k))
    else:
        tokens = np.flatnonzero(row > -np.inf)
    scores = row[tokens].astype(np.float64) - float(peak)
    if sampling.typical_p < 1:
        typical = _most_typical(scores, sampling.typical_p)
        tokens, scores = tokens[typical], scores[typical] - scores[typical].max()
    if sampling.temperature == 0:
        return int(tokens[scores.argmax()])
    is_kept = scores >= (np.float32(log(sampling.min_p)) if sampling.min_p else -np.inf)
    if sampling.top_p < 1:
        is_kept &= _in_nucleus(scores, sampling.top_p)
    tokens = tokens[is_kept]
    sums = np.cumsum(np.exp(scores[is_kept] / temperature))
    place = int(np.searchsorted(sums, uniform * sums[-1], side="right"))
    return int(tokens[min(place, tokens.size - 1)])


def _most_typical(scores: Scores, share: float) -> Ids:
    """Return the places of the tokens whose information is nearest to the entropy.

    They are in the order of the row. Together they have more than `share` of the probability.
    """
    weights = np.exp(scores)
    mean = float((weights * scores).sum() / weights.sum())
    order = np.argsort(np.abs(scores - mean), kind="stable")
    sums = np.cumsum(weights[order])
    count = 1 + int(np.searchsorted(sums, share * sums[-1], side="right"))
    return np.sort(order[:count])


def match_lengths(tokens: np.ndarray[Any, np.dtype[np.int32]], limit: int) -> Ids:
    """For each place, count how many tokens up to it equal the last tokens of the text, at most
    `limit`."""
    last = tokens.size - 1
    lengths = np.zeros(tokens.size, np.int64)
    places = np.arange(last)
    for back in range(limit):
        places = places[places >= back]
        places = places[tokens[places - back] == tokens[last - back]]
        if not places.size:
            break
        lengths[places] += 1
    return lengths


def _in_nucleus(scores: Scores, top_p: float) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Mark the heaviest tokens whose probabilities together reach `top_p`.

    A token below an even share of `1 - top_p` cannot be among them, so only the others are sorted.
    """
    weights = np.exp(scores)
    total = weights.sum()
    heavy = np.flatnonzero(weights >= 0.99 * (1 - top_p) * total / weights.size)
    order = heavy[np.argsort(-weights[heavy], kind="stable")]
    count = 1 + int(np.searchsorted(np.cumsum(weights[order]), top_p * total))
    is_in = np.zeros(weights.size, np.bool_)
    is_in[order[:count]] = True
    return is_in
