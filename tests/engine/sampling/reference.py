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
    if sampling.typical_p < 1:
        order = _most_typical(np.sort(order), row, sampling.typical_p)
        order = order[np.argsort(-row[order], kind="stable")]
    peak = row[order].max()
    weights = np.exp(row - peak)[order].astype(np.float64)
    ranked = np.argsort(-weights, kind="stable")  # two logits may have one weight
    order, weights = order[ranked], weights[ranked]
    for same in (weights == weight for weight in np.unique(weights)):
        order[same] = np.sort(order[same])
    if sampling.top_p < 1:
        reached = np.cumsum(weights) >= sampling.top_p * weights.sum()
        last = int(reached.argmax()) if reached.any() else len(order) - 1
        order, weights = order[: last + 1], weights[: last + 1]
    if sampling.min_p:
        order = order[row[order] - peak >= np.float32(log(sampling.min_p))]
    return _softmax(order, row[order].astype(np.float64) / sampling.temperature)


def _most_typical(order: np.ndarray[Any, Any], row: Row, share: float) -> np.ndarray[Any, Any]:
    """Sort by the distance between information and entropy, as llama.cpp does."""
    logits = row[order].astype(np.float64)
    weights = np.exp(logits - logits.max())
    chances = np.maximum(weights / weights.sum(), 1e-300)
    entropy = -(chances * np.log(chances)).sum()
    ranked = np.argsort(np.abs(-np.log(chances) - entropy).round(9), kind="stable")
    reached = np.cumsum(weights[ranked]) > share * weights.sum()
    last = int(reached.argmax()) if reached.any() else len(order) - 1
    return order[ranked[: last + 1]]


def _softmax(order: np.ndarray[Any, Any], scores: np.ndarray[Any, Any]) -> dict[int, float]:
    weights = np.exp(scores - scores.max())
    shares = weights / weights.sum()
    return {int(token): float(share) for token, share in zip(order, shares, strict=True)}
