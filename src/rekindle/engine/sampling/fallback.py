"""Which tokens of a row may be chosen, and a choice among them, without sorting the row.

A weight is exp(logit), or of all logits less one number: a probability but for a factor. Everything
here is a few passes over float32; a pass over 50,000 of them takes 5 to 25 µs, sorting them a
millisecond.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence as Seq
from hashlib import blake2b, shake_128
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.introspect import opt_func_info

from rekindle.engine.base import Matrix, Row

Ids = np.ndarray[Any, np.dtype[np.int64]]

_BLOCK = 512  # weights that are summed before they are looked at one by one
_GROUPS = 512  # of which the highest logits tell where the largest of a row are
ROUNDING = 1e-5  # of a sum: more than float32 loses over any vocabulary


def highest(values: Row) -> int:
    """The place of the highest. NaN, which a model computed by mistake, is below every number, but
    above minus infinity, which is what a mask forbids."""
    place = int(values.argmax())  # that of the first NaN, if there is one
    if not np.isnan(values[place]):
        return place
    return int(np.where(np.isnan(values), np.finfo(values.dtype).min, values).argmax())


def highest_of_each(rows: Matrix) -> list[int]:
    """As `highest`, for each row."""
    places = rows.argmax(axis=1)
    found: list[int] = places.tolist()
    for row in np.flatnonzero(np.isnan(rows[np.arange(len(rows)), places])):
        found[row] = highest(rows[row])
    return found


def largest(values: Row, count: int) -> Ids:
    """The indices of the `count` largest, in ascending order; of equal values the first ones count.
    What is minus infinity is never among them."""
    floor = _floor(values, count)
    ids = np.flatnonzero(values > floor if floor == -np.inf else values >= floor)
    if ids.size > count:
        order = np.argsort(-values[ids], kind="stable")
        ids = np.sort(ids[order[:count]])
    return ids


def _floor(values: Row, count: int) -> np.float32:
    """A value that at least `count` of them reach, and not many more: that of `count` groups, which
    have one each. Neighbours are in different groups, as the likeliest tokens are often neighbours.
    """
    groups = max(_GROUPS, 4 * count)
    depth = values.size // groups
    if depth >= 4:
        values = values[: depth * groups].reshape(depth, groups).max(axis=0)
    at = values.size - count
    return np.float32(np.partition(values, at)[at]) if at > 0 else np.float32(-np.inf)


class Nucleus:
    """The heaviest weights whose sum reaches a share of the total; of equal ones the first count.
    The heaviest is always in.

    Sums are of float32, and of float64 where that could matter.
    """

    def __init__(
        self, weights: Row, share: float, total: float | None = None, room: Row | None = None
    ) -> None:
        """`total` is their sum, `room` memory of their size, if the caller has them."""
        self.weights = self._all = weights
        self._share = share
        self._total = float(weights.sum()) if total is None else total
        self._room = room

    @property
    def floor(self) -> float:
        """No lighter weight is in. It is an even part of the rest of the total, which all that are
        lighter do not make up, however many there are."""
        return 0.99 * (1 - self._share) * self._total / self._all.size

    def keep(self, places: Ids) -> None:
        """Leave out others, none of which is in; a weight's number is now its place in these."""
        self.weights = self.weights[places]
        self._room = None

    def __contains__(self, index: int) -> bool:
        weight = self.weights[index]
        heavier = np.multiply(self.weights, self.weights > weight, out=self._room)
        equal = int(np.count_nonzero(self.weights[:index] == weight)) * float(weight)
        before, limit = float(heavier.sum()) + equal, self._share * self._total
        if abs(before - limit) < ROUNDING * (before + limit):
            before = float(heavier.sum(dtype=np.float64)) + equal
            limit = self._share * float(self._all.sum(dtype=np.float64))
        return before < limit or not before

    def first_in(self, indices: Ids) -> int | None:
        """The first of them that is in; None if none is."""
        outside, outside_at = np.float32(0), -1  # what comes after one that is not in is not in
        for index in indices.tolist():
            weight = self.weights[index]
            if weight > outside or (weight == outside and index < outside_at):
                if index in self:
                    return int(index)
                outside, outside_at = weight, index
        return None

    def without(self, index: int, chances: Row) -> Row:
        """No chance for one that is not in, nor for any that comes after it."""
        weight = self.weights[index]
        chances = np.multiply(chances, self.weights >= weight)
        chances[index:][self.weights[index:] == weight] = 0
        return chances


def pick(chances: Row, uniform: float) -> int:
    """An index drawn in proportion to its chance, by a number in [0, 1); some chance is above 0."""
    starts = np.arange(0, chances.size, _BLOCK)
    sums = np.cumsum(np.add.reduceat(chances, starts), dtype=np.float64)
    rest = uniform * float(sums[-1])
    block = _first_above(sums, rest)
    if block:
        rest -= float(sums[block - 1])
    start = block * _BLOCK
    inside = np.cumsum(chances[start : start + _BLOCK], dtype=np.float64)
    return start + _first_above(inside, rest)


def _first_above(sums: np.ndarray[Any, np.dtype[np.float64]], value: float) -> int:
    """Where running sums first exceed a value: never at a summand of 0."""
    below_all = np.nextafter(sums[-1], 0)
    return int(np.searchsorted(sums, min(value, below_all), side="right"))


# ----------------------------------------------------------------------
# Tokens drawn from several rows of logits at once, by rejection.
#
# A weight is exp(logit). A row is laid out as columns of at most `_DEPTH` tokens, whose sums are
# known. A column is proposed by its sum, a token of it by its weight, and the token is accepted
# with the chance that makes a draw at temperature 1 one at the temperature that is wanted, if that
# is not higher. So one exponential of the row serves its temperature and its nucleus. No result
# depends on the rows that a row is computed with.

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


# ----------------------------------------------------------------------
# Random numbers that depend on a reply's seed and on the number of the token alone.

_BITS = 53  # of a float64
_SHIFT = np.uint64(64 - _BITS)


class Draws:
    """Random numbers by seed, number of the token in its reply, and attempt: what other tokens and
    other replies have drawn does not matter."""

    def __init__(self, seed: int | None) -> None:
        self._seed = secrets.randbits(64) if seed is None else seed
        self.token = 0  # its number

    def next_token(self) -> None:
        self.token += 1

    def proposals(self) -> bytes:
        """Words of 64 random bits, as many as all proposals for a token take."""
        return shake_128(b"%d %d" % (self._seed, self.token)).digest(PROPOSALS * UNIFORMS * 8)

    def attempts(self, count: int) -> bytes:
        """The first words of 64 random bits, one for each attempt."""
        return b"".join([self._attempt(number) for number in range(count)])

    def _attempt(self, number: int) -> bytes:
        name = b"%d %d %d" % (self._seed, self.token, number)
        return blake2b(name, digest_size=8).digest()[::-1]

    def uniform(self, attempt: int) -> float:
        """In [0, 1)."""
        word = int.from_bytes(self._attempt(attempt), "little")
        return (word >> 64 - _BITS) / (1 << _BITS)


def uniforms(draws: Seq[Draws]) -> Doubles:
    """Numbers in [0, 1): for each use that a proposal has for one, a row of each reply."""
    words = np.frombuffer(b"".join([each.proposals() for each in draws]), "<u8")
    numbers = (words >> _SHIFT).astype(np.float64)
    numbers *= 0.5**_BITS
    return numbers.reshape(-1, PROPOSALS, UNIFORMS).transpose(2, 0, 1)
