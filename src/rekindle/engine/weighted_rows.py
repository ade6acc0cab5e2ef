"""Tokens drawn from several rows of logits at once, by rejection.

A weight is exp(logit). A row is laid out as columns of at most `_DEPTH` tokens, whose sums are
known. A column is proposed by its sum, a token of it by its weight, and the token is accepted with
the chance that makes a draw at temperature 1 one at the temperature that is wanted, if that is not
higher. So one exponential of the row serves its temperature and its nucleus. No result depends on
the rows that a row is computed with.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.lib.introspect import opt_func_info

from rekindle.engine.base import Matrix
from rekindle.engine.candidates import ROUNDING, Ids, Nucleus

PROPOSALS = 7  # at 0.8 three in a hundred flat rows accept none of them, and hardly any others
UNIFORMS = 3  # that a proposal takes: for its column, its token, and whether it is accepted

_DEPTH = 64
_LEAST, _MOST = 1e-14, 1e32  # that the weights of a row may sum up to

_LOG2_E = np.float32(1 / np.log(2))
#: Where NumPy has SIMD code for it, `exp2` takes half as long as `exp`; elsewhere several times.
_EXP2_IS_FAST = any(
    "baseline" not in each["current"]
    for each in opt_func_info(func_name="^exp2$", signature="float32").get("exp2", {}).values()
)

Flags = np.ndarray[Any, np.dtype[np.bool_]]
Doubles = np.ndarray[Any, np.dtype[np.float64]]


class Proposed(NamedTuple):
    """A row for each row, in the order they were proposed."""

    tokens: Ids
    accepted: Flags

    def any(self) -> Flags:
        """Of each row, whether one was accepted."""
        found: Flags = np.logical_or.reduce(self.accepted, axis=1)
        return found

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
        self.weights = _exp(logits, scratch.weights(logits.shape))
        self._sums = self._sum_columns()
        self._running = _running_sums(self._sums)
        self.totals: Doubles = self._running[:, -1]
        #: Rows whose weights float32 can tell from 0 and infinity; no other is proposed from.
        self.usable: Flags = (self.totals > _LEAST) & (self.totals < _MOST)  # never NaN

    def _sum_columns(self) -> Matrix:
        """The tokens of a column are as far apart as there are columns; the last columns may have
        one less."""
        whole = self._size // self._columns
        end = whole * self._columns
        rows = self.weights[:, :end].reshape(len(self.weights), whole, self._columns)
        sums: Matrix = np.add.reduce(rows, axis=1)
        if rest := self._size - end:
            sums[:, :rest] += self.weights[:, end:]
        return sums

    def propose(self, temperatures: Doubles, uniforms: Doubles) -> Proposed:
        """Tokens for rows with a temperature of at most 1 each, by numbers of `draws.uniforms`."""
        wanted = uniforms[0] * self._running[:, -1:]
        columns = np.array(
            [
                sums.searchsorted(each, "right")
                for sums, each in zip(self._running, wanted, strict=True)
            ]
        )
        np.minimum(columns, self._columns - 1, out=columns)  # if a row is not usable
        tokens = self._pick(columns, uniforms[1])
        # No weight is above the highest sum, and in a row that is not flat it is hardly lower.
        most = np.maximum.reduce(self._sums, axis=1, keepdims=True)
        shares = self.weights[self._rows, tokens] / most
        power = (1 / temperatures - 1)[:, None]
        return Proposed(tokens, uniforms[2] < shares**power)

    def _pick(self, columns: Ids, uniforms: Doubles) -> Ids:
        """A token of each column by its weight."""
        places = columns[:, :, None] + np.arange(0, self._size, self._columns)
        beyond = places >= self._size if self._size % self._columns else None
        if beyond is not None:
            places[beyond] = 0
        weights = self.weights.ravel().take(places + self._rows[:, :, None] * self._size)
        if beyond is not None:
            weights[beyond] = 0
        sums = _running_sums(weights)
        wanted = uniforms[:, :, None] * sums[:, :, -1:]
        tokens: Ids = columns + (sums > wanted).argmax(axis=2) * self._columns
        return tokens

    def nucleus(self, row: int, share: float) -> Nucleus:
        _, room = self._scratch.masked((1, self._size))
        return Nucleus(self.weights[row], share, float(self.totals[row]), room[0])

    def surely_in(self, tokens: Ids, shares: Doubles) -> Flags:
        """Whether a token of each row is in the nucleus that has this share of the row's total, as
        far as that is seen at once: no token that is not in is said to be."""
        weights = self.weights[self._rows, tokens[:, None]]
        limits = (shares - ROUNDING) * self.totals
        # What is heavier is in a column whose sum is.
        before = np.add.reduce(self._sums * (self._sums >= weights), axis=1) - weights[:, 0]
        is_in: Flags = before * (1 + ROUNDING) < limits
        if 2 * np.count_nonzero(is_in) < len(is_in):  # the rows are flat
            part = self.weights[:, : self._size // 2]
            flags, lighter = self._scratch.masked(part.shape)
            np.multiply(part, np.less(part, weights, out=flags), out=lighter)
            rest = np.add.reduce(lighter, axis=1) * (1 - ROUNDING) + weights[:, 0]
            is_in |= self.totals - rest < limits
        return is_in


def _exp(logits: Matrix, out: Matrix) -> Matrix:
    if _EXP2_IS_FAST:
        np.multiply(logits, _LOG2_E, out=out)
        return np.exp2(out, out=out)
    return np.exp(logits, out=out)


def _running_sums(values: Matrix) -> Doubles:
    """Along the last axis."""
    sums: Doubles = np.add.accumulate(values.astype(np.float64), axis=-1)
    return sums
