"""Where the tokens of a sequence stand in the model's position encoding.

A token's position is its number, but for models with M-RoPE (Qwen-VL): there all tokens of a
picture have the position at which it begins, and two further numbers each, their column and row
from that position on. Text goes on one after the largest of those numbers. So what is cut, shared
and moved by tokens has to be found by position, column and row.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rekindle.engine.base import Blob, Matrix
from rekindle.engine.llamacpp.state import read_cells
from rekindle.errors import CorruptBlock

PLANES = 4  # numbers of a position in a native batch: time, row, column, and one that is unused

PLACE = 2  # numbers of a place

#: Column and row of each token of a picture, or of some of them that follow each other.
Places = np.ndarray[Any, np.dtype[np.int32]]


@dataclass(frozen=True, slots=True)
class _Picture:
    """Tokens that have one position; row by row, the last row perhaps not to its end."""

    start: int
    stop: int
    position: int
    columns: int

    @property
    def after(self) -> int:
        """The position of text that follows."""
        tokens = self.stop - self.start
        return self.position + max(min(tokens, self.columns), -(-tokens // self.columns))


class Positions:
    """Those of one sequence; immutable."""

    __slots__ = ("_pictures",)

    def __init__(self, pictures: tuple[_Picture, ...] = ()) -> None:
        self._pictures = pictures  # in order

    def of(self, token: int) -> int:
        """The position of a token, or of text that is to follow those before it."""
        picture = self._before(token)
        if picture is None:
            return token
        return picture.position if token < picture.stop else picture.after + token - picture.stop

    def _before(self, token: int) -> _Picture | None:
        """The last picture that begins at a token or before it."""
        found = bisect_right(self._pictures, token, key=lambda each: each.start)
        return self._pictures[found - 1] if found else None

    def whole(self, tokens: int) -> int:
        """The most tokens, up to so many, at which no picture is cut."""
        picture = self._before(tokens)
        return picture.start if picture and picture.start < tokens < picture.stop else tokens

    def first(self, tokens: int) -> Positions:
        """Those of the first so many tokens."""
        kept = (each for each in self._pictures if each.start < tokens)
        return Positions(tuple(replace(each, stop=min(each.stop, tokens)) for each in kept))

    def goes_on(self, token: int, places: Places) -> bool:
        """Whether these are more tokens of the picture that the ones before `token` are of."""
        if not places[0].any():
            return False
        picture = self._before(token)
        if picture is None or picture.stop != token:
            raise ValueError("the beginning of this picture is missing")
        return True

    def place(self, token: int, places: Places) -> int:
        """The position of a picture whose tokens, or some of them, follow."""
        return self.of(token - 1 if self.goes_on(token, places) else token)

    def with_picture(self, token: int, places: Places) -> Positions:
        """With those that follow."""
        stop, columns = token + len(places), int(places[:, 0].max()) + 1
        if self.goes_on(token, places):
            *others, last = self._pictures
            grown = replace(last, stop=stop, columns=max(last.columns, columns))
            return Positions((*others, grown))
        return Positions((*self._pictures, _Picture(token, stop, self.of(token), columns)))

    def with_block(self, token: int, blob: Blob, tokens: int) -> Positions:
        """With the tokens of a block that follows; raises CorruptBlock when it cannot."""
        cells = np.sort(read_cells(blob), order=["position", "row", "column"])
        if len(cells) != tokens:
            raise CorruptBlock("a block says that it holds another number of tokens")
        grown = self
        try:
            for start, places in _pictures_of(cells):
                grown = grown.with_picture(token + start, places)
        except ValueError as error:
            raise CorruptBlock(str(error)) from None
        if [grown.of(token + number) for number in range(tokens)] != cells["position"].tolist():
            raise CorruptBlock("a block is of other positions")
        return grown


class SlotPositions(dict[int, Positions]):
    """By slot. One that is not here has no pictures: its positions are token numbers."""

    def __missing__(self, slot: int) -> Positions:
        return Positions()


def join_places(vectors: Matrix, places: Places) -> Matrix:
    """A picture's vectors, each with its place behind it: then whoever keeps or cuts them has the
    places, too."""
    return np.concatenate((vectors, places), axis=1, dtype=np.float32)


def split_places(rows: Matrix) -> tuple[Matrix, Places]:
    return rows[:, :-PLACE], rows[:, -PLACE:].astype(np.int32)


def _pictures_of(cells: np.ndarray[Any, Any]) -> Iterator[tuple[int, Places]]:
    """The pictures among sorted cells: the first cell of each, and where its cells stand."""
    shown = np.flatnonzero(cells["token"] < 0)
    for position in np.unique(cells["position"][shown]):
        own = cells[cells["position"] == position]
        places = np.stack((own["column"], own["row"]), axis=1) - position
        yield int(np.searchsorted(cells["position"], position)), places
