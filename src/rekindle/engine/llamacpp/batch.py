"""The rows of one native call."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np

from rekindle.engine.base import Matrix
from rekindle.engine.llamacpp import bindings
from rekindle.engine.llamacpp.positions import PLANES, Places


class Rows(NamedTuple):
    """Consecutive tokens of one sequence; `wanted` asks for the last one's logits. A picture's are
    computed from `vectors`."""

    slot: int
    start: int  # the first one's position
    tokens: Seq[int]
    wanted: bool
    vectors: Matrix | None = None
    places: Places | None = None  # of a picture's, where they all have the position `start`


class BatchArrays:
    """Batch arrays allocated once; filling them is what Python does in every step."""

    def __init__(self, rows: int) -> None:
        self._tokens = np.zeros(rows, np.int32)
        self._positions = np.zeros(PLANES * rows, np.int32)
        self._slots = np.zeros(rows, np.int32)
        self._wanted = np.zeros(rows, np.int8)
        self._ones = np.ones(rows, np.int32)
        # The same memory, for single rows: NumPy takes several times as long to set one.
        self._each_token, self._each_slot = self._tokens.data, self._slots.data
        self._each_position, self._each_wanted = self._positions.data, self._wanted.data
        int_pointer = ctypes.POINTER(ctypes.c_int32)
        base = self._slots.ctypes.data
        self._slot_pointers = (int_pointer * rows)(
            *(ctypes.cast(base + 4 * row, int_pointer) for row in range(rows))
        )
        self._token_pointer = self._tokens.ctypes.data_as(int_pointer)
        self._native = bindings.Batch(
            0,
            self._token_pointer,
            None,
            self._positions.ctypes.data_as(int_pointer),
            self._ones.ctypes.data_as(int_pointer),
            self._slot_pointers,
            self._wanted.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )

    def fill(
        self, rows: Seq[Rows], *, all_wanted: bool = False
    ) -> tuple[bindings.Batch, list[int]]:
        """`all_wanted`: every row counts for what is made of its sequence, as for a vector."""
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

    def advance(self, tokens: Seq[int]) -> bindings.Batch:
        """Rows of text as they were filled last, a single one of each sequence, one token on."""
        for row, token in enumerate(tokens):
            self._each_token[row] = token
            self._each_position[row] += 1
        return self._native

    def _fill_run(self, run: Rows, start: int, *, all_wanted: bool) -> None:
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
        """Let the rows be those of pictures; of text, where there are no vectors."""
        if not vectors:
            self._native.token, self._native.embd = self._token_pointer, None
            return
        # Kept here: the native batch does not keep it alive.
        self._vectors = np.ascontiguousarray(np.concatenate(vectors), np.float32)
        self._native.token = None
        self._native.embd = self._vectors.ctypes.data_as(ctypes.POINTER(ctypes.c_float))

    def _take_places(self, places: Places) -> None:
        """Fill the further planes, which llama.cpp fills itself for text."""
        times, rows, columns, unused = self._positions[: PLANES * len(places)].reshape(PLANES, -1)
        columns[:], rows[:] = (times[:, None] + places).T
        unused[:] = 0
