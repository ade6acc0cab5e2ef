"""Tokens drawn from several rows of logits at once, by rejection.

A weight is exp(logit). A row is laid out as columns of at most `_DEPTH` tokens, of which the sums
and the heaviest weights are known. A column is proposed, then a token of it by weight, and the
token is accepted by what the temperature makes of its weight beside the heaviest of its column. So
one exponential of the row serves every temperature up to 1 and the nucleus, and nothing else is
done to each of its tokens. No result depends on the rows that a row is computed with.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from rekindle.engine.base import Matrix
from rekindle.engine.candidates import ROUNDING, Ids, Nucleus

PROPOSALS = 6  # of which none is accepted once in some hundred flat rows, and hardly ever in others
UNIFORMS = 3  # that a proposal takes: for its column, its token, and whether it is accepted

_DEPTH = 64
_LEAST, _MOST = np.float32(1e-16), np.float32(1e30)  # that a row's heaviest weight may be
_LIGHT = np.float32(1e-38)  # below it float32 loses precision, and nothing is ever drawn

Flags = np.ndarray[Any, np.dtype[np.bool_]]
Doubles = np.ndarray[Any, np.dtype[np.float64]]


class Proposed(NamedTuple):
    """A row for each row, in the order they were proposed."""

    tokens: Ids
    accepted: Flags

    def first(self) -> Ids:
        """The first of each row that was accepted, or any if none was."""
        first: Ids = self.tokens[np.arange(len(self.tokens)), self.accepted.argmax(axis=1)]
        return first


class Scratch:
    """Memory for groups of rows, which a thread uses again and again: fresh pages cost more than
    the arithmetic."""

    def __init__(self) -> None:
        self._weights = self._masked = np.empty(0, np.float32)
        self._flags = np.empty(0, np.bool_)

    def weights(self, shape: tuple[int, int]) -> Matrix:
        size = shape[0] * shape[1]
        if self._weights.size < size:
            self._weights, self._masked = np.empty((2, size), np.float32)
            self._flags = np.empty(size, np.bool_)
        return self._weights[:size].reshape(shape)

    def masked(self, shape: tuple[int, int]) -> tuple[Flags, Matrix]:
        """Beside the weights, and no larger."""
        size = shape[0] * shape[1]
        return self._flags[:size].reshape(shape), self._masked[:size].reshape(shape)


class WeightedRows:
    def __init__(self, logits: Matrix, scratch: Scratch) -> None:
        self._scratch = scratch
        count, self._size = logits.shape
        self._columns = -(-self._size // _DEPTH)
        self._rows = np.arange(count)[:, None]
        self.weights: Matrix = np.exp(logits, out=scratch.weights(logits.shape))
        self._sums = self._by_column(np.add)
        self._heaviest = self._by_column(np.maximum)
        self._most = self._heaviest.max(axis=1, keepdims=True)
        self.totals: Doubles = self._sums.astype(np.float64).sum(axis=1)
        #: Rows whose weights float32 can tell from 0 and infinity; no other is proposed from.
        self.usable: Flags = ((self._most > _LEAST) & (self._most < _MOST))[:, 0]  # never NaN

    def _by_column(self, reduction: np.ufunc) -> Matrix:
        """The tokens of a column are as far apart as there are columns; the last columns may have
        one less."""
        whole = self._size // self._columns
        end = whole * self._columns
        rows = self.weights[:, :end].reshape(len(self.weights), whole, self._columns)
        result: Matrix = reduction.reduce(rows, axis=1)
        if rest := self._size - end:
            reduction(result[:, :rest], self.weights[:, end:], out=result[:, :rest])
        return result

    def propose(self, temperatures: Matrix, uniforms: Doubles) -> Proposed:
        """Tokens for rows with a temperature of at most 1 each, in a column, by numbers in [0, 1)
        of `draws.uniforms`."""
        power = np.maximum(1 / temperatures - 1, _LIGHT)  # times minus infinity it is no NaN
        most = np.log(self._most)
        ceilings = _tempered(self._heaviest, most, power)
        sums = np.cumsum(self._sums * ceilings, axis=1, dtype=np.float64)
        wanted = uniforms[0] * sums[:, -1:]
        columns = np.array(
            [own.searchsorted(each, "right") for own, each in zip(sums, wanted, strict=True)]
        )
        np.minimum(columns, self._columns - 1, out=columns)  # if a row is not usable
        tokens = self._pick(columns, uniforms[1])
        scores = _tempered(self.weights[self._rows, tokens], most, power)
        return Proposed(tokens, uniforms[2] * ceilings[self._rows, columns] < scores)

    def _pick(self, columns: Ids, uniforms: Doubles) -> Ids:
        """A token of each column by its weight."""
        places = columns[:, :, None] + np.arange(0, self._size, self._columns)
        beyond = places >= self._size if self._size % self._columns else None
        if beyond is not None:
            places[beyond] = 0
        weights = self.weights[self._rows[:, :, None], places]
        if beyond is not None:
            weights[beyond] = 0
        sums = np.cumsum(weights, axis=2, dtype=np.float64)
        wanted = uniforms * sums[:, :, -1]
        depth = (sums > wanted[:, :, None]).argmax(axis=2)
        tokens: Ids = columns + depth * self._columns
        return tokens

    def nucleus(self, row: int, share: float) -> Nucleus:
        _, room = self._scratch.masked((1, self._size))
        return Nucleus(self.weights[row], share, float(self.totals[row]), room[0])

    def surely_in(self, tokens: Ids, shares: Doubles) -> Flags:
        """Whether a token of each row is in the nucleus that has this share of the row's total, as
        far as that is seen at once: no token that is not in is said to be."""
        weights = self.weights[self._rows, tokens[:, None]]
        limits = (shares - ROUNDING) * self.totals
        before = (self._sums * (self._heaviest >= weights)).sum(axis=1) - weights[:, 0]
        is_in: Flags = before * (1 + ROUNDING) < limits
        if 2 * np.count_nonzero(is_in) < len(is_in):  # the rows are flat
            part = self.weights[:, : self._size // 2]
            flags, lighter = self._scratch.masked(part.shape)
            np.multiply(part, np.less(part, weights, out=flags), out=lighter)
            rest = lighter.sum(axis=1) * (1 - ROUNDING) + weights[:, 0]
            is_in |= self.totals - rest < limits
        return is_in


def _tempered(weights: Matrix, most: Matrix, power: Matrix) -> Matrix:
    """By what the temperature multiplies weights: 1 for the row's heaviest, which is exp(most)."""
    scores = np.log(weights)
    scores -= most
    scores *= power
    return np.exp(scores, out=scores)
