"""Fills the arrays of a native call, and maps tokens to the model's positions.

The position of a token is its number, except with M-RoPE (Qwen-VL). There all tokens of a picture
share the position at which it begins, and have a column and a row each. Text continues one after
the largest of these numbers.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from rekindle.engine.base import Blob, Matrix
from rekindle.engine.llamacpp import bindings
from rekindle.engine.llamacpp.state import read_cells
from rekindle.errors import CorruptBlock

PLANES = 4  # numbers of a position in a native batch: time, row, column, unused
PLACE = 2  # numbers of a place: column, row

#: Column and row of consecutive tokens of a picture.
Places = np.ndarray[Any, np.dtype[np.int32]]


@dataclass(frozen=True, slots=True)
class _Picture:
    """Tokens that share one position. They fill rows, and the last row may be incomplete."""

    start: int
    stop: int
    position: int
    columns: int

    @property
    def after(self) -> int:
        """The position of the text after the picture."""
        tokens = self.stop - self.start
        return self.position + max(min(tokens, self.columns), -(-tokens // self.columns))


@dataclass(frozen=True, slots=True)
class SequencePositions:
    """The positions of one sequence. Without pictures they are the numbers of its tokens."""

    _pictures: tuple[_Picture, ...] = ()

    def of(self, token: int) -> int:
        """Return the position of a token, or of text that would follow."""
        picture = self._before(token)
        if picture is None:
            return token
        return picture.position if token < picture.stop else picture.after + token - picture.stop

    def _before(self, token: int) -> _Picture | None:
        found = bisect_right(self._pictures, token, key=lambda each: each.start)
        return self._pictures[found - 1] if found else None

    def whole(self, tokens: int) -> int:
        """Return the largest cut point up to `tokens` that is not inside a picture."""
        picture = self._before(tokens)
        return picture.start if picture and picture.start < tokens < picture.stop else tokens

    def first(self, tokens: int) -> SequencePositions:
        kept = (each for each in self._pictures if each.start < tokens)
        return SequencePositions(tuple(replace(each, stop=min(each.stop, tokens)) for each in kept))

    def continues_picture(self, token: int, places: Places) -> bool:
        """Return whether these places continue the picture before `token`."""
        if not places[0].any():
            return False
        picture = self._before(token)
        if picture is None or picture.stop != token:
            raise ValueError("the beginning of this picture is missing")
        return True

    def place(self, token: int, places: Places) -> int:
        """Return the position of picture tokens that follow."""
        return self.of(token - 1 if self.continues_picture(token, places) else token)

    def with_picture(self, token: int, places: Places) -> SequencePositions:
        stop, columns = token + len(places), int(places[:, 0].max()) + 1
        if self.continues_picture(token, places):
            *others, last = self._pictures
            grown = replace(last, stop=stop, columns=max(last.columns, columns))
            return SequencePositions((*others, grown))
        return SequencePositions((*self._pictures, _Picture(token, stop, self.of(token), columns)))

    def with_block(self, token: int, blob: Blob, tokens: int) -> SequencePositions:
        """Append the tokens of a block; raises CorruptBlock if its positions do not fit."""
        cells = np.sort(read_cells(blob), order=["position", "row", "column"])
        if len(cells) != tokens:
            raise CorruptBlock("the header of a block gives another number of tokens")
        grown = self
        try:
            for start, places in _pictures_of(cells):
                grown = grown.with_picture(token + start, places)
        except ValueError as error:
            raise CorruptBlock(str(error)) from None
        if [grown.of(token + number) for number in range(tokens)] != cells["position"].tolist():
            raise CorruptBlock("a block belongs to other positions")
        return grown


def join_places(vectors: Matrix, places: Places) -> Matrix:
    """Append its place to each vector of a picture, so that both are kept and cut together."""
    return np.concatenate((vectors, places), axis=1, dtype=np.float32)


def split_places(rows: Matrix) -> tuple[Matrix, Places]:
    return rows[:, :-PLACE], rows[:, -PLACE:].astype(np.int32)


def _pictures_of(cells: np.ndarray[Any, Any]) -> Iterator[tuple[int, Places]]:
    """Yield the first cell and the places of each picture among sorted cells."""
    shown = np.flatnonzero(cells["token"] < 0)
    for position in np.unique(cells["position"][shown]):
        own = cells[cells["position"] == position]
        places = np.stack((own["column"], own["row"]), axis=1) - position
        yield int(np.searchsorted(cells["position"], position)), places


class BatchRows(NamedTuple):
    """Consecutive tokens of one sequence. `wanted` asks for the logits of the last one. Tokens of a
    picture are computed from `vectors`."""

    slot: int
    start: int  # position of the first token
    tokens: Seq[int]
    wanted: bool
    vectors: Matrix | None = None
    places: Places | None = None  # of picture tokens, which all have the position `start`


class BatchArrays:
    """The arrays of a native batch, allocated once because Python fills them in every step."""

    def __init__(self, rows: int) -> None:
        self._tokens = np.zeros(rows, np.int32)
        self._positions = np.zeros(PLANES * rows, np.int32)
        self._slots = np.zeros(rows, np.int32)
        self._wanted = np.zeros(rows, np.int8)
        self._ones = np.ones(rows, np.int32)
        # Views for single rows: setting one through NumPy takes several times as long.
        self._each_token, self._each_slot = self._tokens.data, self._slots.data
        self._each_position, self._each_wanted = self._positions.data, self._wanted.data
        int_pointer = ctypes.POINTER(ctypes.c_int32)
        base = self._slots.ctypes.data
        self._slot_pointers = (int_pointer * rows)(
            *(ctypes.cast(base + 4 * row, int_pointer) for row in range(rows))
        )
        self._token_pointer = self._tokens.ctypes.data_as(int_pointer)
        self._native = bindings.LlamaBatch(
            0,
            self._token_pointer,
            None,
            self._positions.ctypes.data_as(int_pointer),
            self._ones.ctypes.data_as(int_pointer),
            self._slot_pointers,
            self._wanted.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )

    def fill(
        self, rows: Seq[BatchRows], *, all_wanted: bool = False
    ) -> tuple[bindings.LlamaBatch, list[int]]:
        """Fill in all rows, and return the index of the last row of each run. `all_wanted` asks for
        the output of every row, as pooling needs."""
        filled = 0
        last = []
        for run in rows:
            count = len(run.tokens)
            if count == 1 and run.vectors is None:
                self._each_token[filled] = run.tokens[0]
                self._each_position[filled] = run.start
                self._each_slot[filled] = run.slot
                self._each_wanted[filled] = run.wanted
            else:
                self._fill_run(run, filled, all_wanted=all_wanted)
            filled += count
            last.append(filled - 1)
        self._native.n_tokens = filled
        self._take_vectors([run.vectors for run in rows if run.vectors is not None])
        if places := [run.places for run in rows if run.places is not None]:
            self._take_places(np.concatenate(places))
        return self._native, last

    def advance(self, tokens: Seq[int]) -> bindings.LlamaBatch:
        """Move the last batch, which had one text row per sequence, ahead by one token."""
        for row, token in enumerate(tokens):
            self._each_token[row] = token
            self._each_position[row] += 1
        return self._native

    def _fill_run(self, run: BatchRows, start: int, *, all_wanted: bool) -> None:
        stop = start + len(run.tokens)
        if run.vectors is None:
            self._tokens[start:stop] = run.tokens
        is_flat = run.places is None
        self._positions[start:stop] = (
            np.arange(run.start, run.start + len(run.tokens)) if is_flat else run.start
        )
        self._slots[start:stop] = run.slot
        self._wanted[start:stop] = all_wanted
        self._wanted[stop - 1] = run.wanted

    def _take_vectors(self, vectors: Seq[Matrix]) -> None:
        """Point the batch at vectors, or at token ids if there are none."""
        if not vectors:
            self._native.token, self._native.embd = self._token_pointer, None
            return
        # An attribute, because the native batch does not keep it alive.
        self._vectors = np.ascontiguousarray(np.concatenate(vectors), np.float32)
        self._native.token = None
        self._native.embd = self._vectors.ctypes.data_as(ctypes.POINTER(ctypes.c_float))

    def _take_places(self, places: Places) -> None:
        """Fill the further planes of positions. llama.cpp fills them itself for text."""
        times, rows, columns, unused = self._positions[: PLANES * len(places)].reshape(PLANES, -1)
        columns[:], rows[:] = (times[:, None] + places).T
        unused[:] = 0
