"""Sampling in NumPy, in the order that the other engines have: mask, bias, penalties, choice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

from rekindle.engine.base import Sampled, TokenMask
from rekindle.protocol.requests import SamplingParams
from tests.support.numpy_engine.model import Array

Wide = np.ndarray[Any, np.dtype[np.float64]]


class NumpySampler:
    def __init__(
        self, params: SamplingParams, prompt: Seq[int], token_mask: TokenMask | None
    ) -> None:
        self._params = params
        self._mask = token_mask
        self._prompt = list(prompt)
        self._reply: list[int] = []
        self._random = np.random.default_rng(params.seed)

    def sample(self, logits: Array, /) -> Sampled:
        row = logits.copy()
        if self._mask is not None:
            self._mask.mask(row)
        for token, bias in self._params.logit_bias.items():
            row[token] += bias
        self._penalise(row)
        token = self._choose(row)
        self._reply.append(token)
        if self._mask is not None:
            self._mask.accept(token)
        return self._with_logprobs(token, logits)

    def _penalise(self, row: Array) -> None:
        """Repetition looks back over the prompt too; presence and frequency at the reply alone."""
        params = self._params
        window = params.repetition_context_size
        recent = [*self._prompt[-window:], *self._reply][-window:] if window else []
        for token in set(recent):
            factor = params.repetition_penalty
            row[token] = row[token] / factor if row[token] > 0 else row[token] * factor
        if params.frequency_penalty or params.presence_penalty:
            for token, count in Counter(self._reply).items():
                row[token] -= count * params.frequency_penalty + params.presence_penalty

    def _choose(self, row: Array) -> int:
        if self._params.temperature == 0:
            return int(row.argmax())
        order = self._likeliest(row)
        scores = row[order].astype(np.float64) / self._params.temperature
        return int(self._random.choice(order, p=_softmax(scores)))

    def _likeliest(self, row: Array) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The tokens that top-k, top-p and min-p leave, the likeliest first."""
        params = self._params
        order = np.argsort(-row, kind="stable")
        if params.top_k:
            order = order[: params.top_k]
        chances = _softmax(row[order].astype(np.float64))
        if params.top_p < 1:
            before = np.cumsum(chances) - chances
            order, chances = order[before < params.top_p], chances[before < params.top_p]
        return np.compress(chances >= params.min_p * chances[0], order)

    def _with_logprobs(self, token: int, logits: Array) -> Sampled:
        """Log probabilities are the model's own, before mask, bias and penalties."""
        top = self._params.top_logprobs
        if top is None:
            return Sampled(token)
        logprobs = np.log(_softmax(logits.astype(np.float64)))
        best = np.argsort(-logprobs, kind="stable")[:top]
        return Sampled(
            token, float(logprobs[token]), tuple((int(n), float(logprobs[n])) for n in best)
        )

    def close(self) -> None: ...


def _softmax(scores: Wide) -> Wide:
    weights = np.exp(scores - scores.max())
    chances: Wide = weights / weights.sum()
    return chances
