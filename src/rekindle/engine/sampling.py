"""The sampler of every engine: tokens chosen from rows of logits, in NumPy.

The order is that of llama.cpp's chain: mask, bias, penalties, top-k, top-p, min-p, temperature,
draw. Each draw depends on the seed, its number in the reply and the row alone.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence as Seq
from hashlib import blake2b
from itertools import count
from math import inf, log

import numpy as np

from rekindle.engine.base import Row, Sampled, Sampler, TokenMask
from rekindle.engine.candidates import Ids, Nucleus, highest, largest, pick
from rekindle.engine.penalties import build_penalties
from rekindle.protocol.requests import SamplingParams

_COLDEST = 1e-6  # a lower temperature is 0 in float32


def build_sampler(
    sampling: SamplingParams, prompt: Seq[int], token_mask: TokenMask | None = None
) -> Sampler:
    """A sampler for one reply; `prompt` are the ids of its text."""
    return TokenSampler(sampling, prompt, token_mask)


class TokenSampler:
    """Chooses the tokens of one reply."""

    def __init__(
        self, sampling: SamplingParams, prompt: Seq[int], token_mask: TokenMask | None
    ) -> None:
        self._sampling = sampling
        self._mask = token_mask
        self._penalties = build_penalties(sampling, prompt)
        self._biased = np.array(list(sampling.logit_bias), dtype=np.int64)
        self._bias = np.array(list(sampling.logit_bias.values()), dtype=np.float32)
        self._draws = Draws(sampling.seed)

    def sample(self, row: Row, /) -> Sampled:
        """Choose from one row of logits, which is used up."""
        top = self._sampling.top_logprobs
        logits = None if top is None else row.copy()  # as the model gave them
        token = self._choose(row)
        self._draws.next_token()
        for penalty in self._penalties:
            penalty.accept(token)
        if self._mask is not None:
            self._mask.accept(token)
        return Sampled(token) if logits is None else with_logprobs(token, logits, top or 0)

    def _choose(self, row: Row) -> int:
        if self._mask is not None:
            self._mask.mask(row)
        if self._biased.size:
            row[self._biased] += self._bias
        for penalty in self._penalties:
            penalty.apply(row)
        if self._sampling.temperature == 0:
            return highest(row)
        if 0 < self._sampling.top_k < row.size:
            left = largest(row, self._sampling.top_k)
            return int(left[self._draw(row[left])]) if left.size else highest(row)
        return self._draw(row)

    def _draw(self, logits: Row) -> int:
        """The place of a token that is drawn by its chance."""
        most = logits.max()
        if not np.isfinite(most):  # nothing may come, or the model has computed nonsense
            return highest(logits)
        with np.errstate(over="ignore"):  # what is too far below is minus infinity
            logits -= most
            left, nucleus = self._cut(logits)
            scores = logits if left is None else logits[left]
            if nucleus is not None and self._sampling.temperature == 1:
                chances = nucleus.weights
            else:
                scores /= np.float32(max(self._sampling.temperature, _COLDEST))
                chances = np.exp(scores, out=scores)
        place = self._pick(chances, nucleus)
        return place if left is None else int(left[place])

    def _cut(self, scores: Row) -> tuple[Ids | None, Nucleus | None]:
        """The places that top-p and min-p leave, or most others left out; None: hardly any are. A
        score is a logit less the highest."""
        top_p, min_p = self._sampling.top_p, self._sampling.min_p
        floor = log(min_p) if min_p else -inf
        nucleus = None
        if top_p < 1:
            nucleus = Nucleus(np.exp(scores), top_p)
            floor = max(floor, log(nucleus.floor))
        if floor == -inf:
            return None, None
        is_left = scores >= np.float32(floor)
        if not min_p and 4 * np.count_nonzero(is_left) > is_left.size:
            return None, nucleus
        left = np.flatnonzero(is_left)
        if nucleus is not None:
            nucleus.keep(left)
        return left, nucleus

    def _pick(self, chances: Row, nucleus: Nucleus | None) -> int:
        """What falls outside the nucleus is drawn again: rare, unless the temperature is high."""
        for attempt in count():
            index = pick(chances, self._draws.uniform(attempt))
            if nucleus is None or index in nucleus:
                return index
            chances = nucleus.without(index, chances)
        raise AssertionError("the heaviest weight is in every nucleus")


class Draws:
    """Random numbers by seed, number of the token in its reply, and attempt: what other tokens and
    other replies have drawn does not matter."""

    def __init__(self, seed: int | None) -> None:
        self._seed = secrets.randbits(64) if seed is None else seed
        self._token = 0

    def next_token(self) -> None:
        self._token += 1

    def uniform(self, attempt: int) -> float:
        """In [0, 1)."""
        name = b"%d %d %d" % (self._seed, self._token, attempt)
        return (int.from_bytes(blake2b(name, digest_size=8).digest()) >> 11) / (1 << 53)


def with_logprobs(token: int, logits: Row, top: int) -> Sampled:
    """The token with log probabilities as the model gave them, before any mask."""
    most = float(logits.max())
    total = np.exp(logits - np.float32(most)).sum(dtype=np.float64)
    base = most + float(np.log(total))
    best = largest(logits, top) if top else np.zeros(0, np.int64)
    best = best[np.argsort(-logits[best], kind="stable")]
    pairs = tuple((int(each), float(logits[each]) - base) for each in best)
    return Sampled(token, float(logits[token]) - base, pairs)
