"""Tokens chosen by compiled code, `rows.c`, which holds no lock of the interpreter meanwhile.

The code is compiled when the package is built, where there is a C compiler (`hatch_build.py`).
"""

from __future__ import annotations

import ctypes
from ctypes import c_char_p, c_int32, c_int64, c_void_p
from functools import cache
from math import inf, log
from pathlib import Path
from struct import Struct

import numpy as np

from rekindle.engine.base import Matrix
from rekindle.protocol.requests import SamplingParams

LIBRARY = Path(__file__).with_name("_rows.so")  # looked for nowhere else
GREEDY, PROPOSE, DRAW = range(3)  # ways to choose
UNDECIDED = -1  # in place of a token
COLDEST = 1e-6  # a lower temperature is 0 in float32


_SETTINGS = Struct("=iiqddd")
WORDS = 21  # of 64 random bits, after the settings
CHOICE_BYTES = _SETTINGS.size + 8 * WORDS


class Memory:
    """What choosing from a row takes; each thread has its own."""

    def __init__(self) -> None:
        self._floats = np.empty(0, np.float32)
        self._address = 0

    def address(self, size: int) -> int:
        """For a row of this size."""
        needed = 5 * size + 64
        if self._floats.size < needed:
            self._floats = np.empty(needed, np.float32)
            self._address = self._floats.ctypes.data
        return self._address


class CompiledRows:
    def __init__(self, library: ctypes.CDLL) -> None:
        self._choose = library.choose_tokens
        self._choose.argtypes = [c_void_p, c_int64, c_int64, c_char_p, c_void_p, c_void_p]
        self._choose.restype = None

    def choose(self, choices: bytes, logits: Matrix, memory: Memory) -> list[int]:
        """A token of each row, or `UNDECIDED`: settings and random words are given for each."""
        count, size = logits.shape
        assert len(choices) == count * CHOICE_BYTES
        assert logits.flags.c_contiguous
        assert logits.dtype == np.float32
        tokens = (c_int32 * count)()
        address = logits.ctypes.data
        self._choose(address, size, count, choices, memory.address(size), tokens)
        return list(tokens)


def pack(sampling: SamplingParams, way: int, *, draws: int = 0) -> bytes:
    """The settings of a choice; a draw takes a word."""
    temperature = max(sampling.temperature, COLDEST)
    least = log(sampling.min_p) if sampling.min_p else -inf
    numbers = (draws, temperature, sampling.top_p, least)
    return _SETTINGS.pack(way, sampling.top_k, *numbers)


@cache
def load() -> CompiledRows | None:
    """None where there is no such code, or that of another version."""
    try:
        library = ctypes.CDLL(str(LIBRARY))
        if c_int32.in_dll(library, "choice_bytes").value != CHOICE_BYTES:
            return None
    except (OSError, ValueError):
        return None
    return CompiledRows(library)
