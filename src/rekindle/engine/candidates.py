"""Which tokens of a row may be chosen, and a choice among them, without sorting the row.

A weight is exp(logit), or of all logits less one number: a probability but for a factor. Everything
here is a few passes over float32; a pass over 50,000 of them takes 5 to 25 µs, sorting them a
millisecond.
"""

from __future__ import annotations

from typing import Any

import numpy as np

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
