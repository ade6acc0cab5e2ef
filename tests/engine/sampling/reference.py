"""Defines sampling in the plainest way: sort the row, cut it, compute each token's probability."""

from __future__ import annotations

from math import log
from typing import Any

import numpy as np

from rekindle.engine.base import Row
from rekindle.protocol.requests import SamplingParams


def probabilities(row: Row, sampling: SamplingParams) -> dict[int, float]:
    """Return the probability of each token that may be drawn. Ties go to the lower token id."""
    order = np.argsort(-row, kind="stable")
    order = order[row[order] > -np.inf]
    if sampling.top_k:
        order = order[: sampling.top_k]
    weights = np.exp(row - row.max())[order].astype(np.float64)
    ranked = np.argsort(-weights, kind="stable")  # two logits may have one weight
    order, weights = order[ranked], weights[ranked]
    for same in (weights == weight for weight in np.unique(weights)):
        order[same] = np.sort(order[same])
    if sampling.top_p < 1:
        reached = np.cumsum(weights) >= sampling.top_p * weights.sum()
        last = int(reached.argmax()) if reached.any() else len(order) - 1
        order, weights = order[: last + 1], weights[: last + 1]
    if sampling.min_p:
        order = order[row[order] - row.max() >= np.float32(log(sampling.min_p))]
    return _softmax(order, row[order].astype(np.float64) / sampling.temperature)


def _softmax(order: np.ndarray[Any, Any], scores: np.ndarray[Any, Any]) -> dict[int, float]:
    weights = np.exp(scores - scores.max())
    shares = weights / weights.sum()
    return {int(token): float(share) for token, share in zip(order, shares, strict=True)}
