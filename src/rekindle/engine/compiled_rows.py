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

from rekindle.engine.base import Matrix, Row
from rekindle.protocol.requests import SamplingParams

LIBRARY = Path(__file__).with_name("_rows.so")  # looked for nowhere else
GREEDY, PROPOSE, DRAW = range(3)  # ways to choose
UNDECIDED = -1  # in place of a token
COLDEST = 1e-6  # a lower temperature is 0 in float32


_SETTINGS = Struct("=iiqddd")
WORDS = 21  # of 64 random bits, after the settings
CHOICE_BYTES = _SETTINGS.size + 8 * WORDS


class CompiledRows:
    def __init__(self, library: ctypes.CDLL) -> None:
        self._choose = library.choose_tokens
        self._choose.argtypes = [c_void_p, c_int64, c_int64, c_char_p, c_void_p, c_void_p]
        self._choose.restype = None

    def choose(self, choices: bytes, logits: Matrix, memory: Row) -> list[int]:
        """A token of each row, or `UNDECIDED`: settings and random bytes are given for each."""
        count, size = logits.shape
        assert len(choices) == count * CHOICE_BYTES
        assert logits.flags.c_contiguous
        assert memory.size >= memory_floats(size)
        tokens = np.empty(count, np.int32)
        self._choose(
            logits.ctypes.data, size, count, choices, memory.ctypes.data, tokens.ctypes.data
        )
        found: list[int] = tokens.tolist()
        return found


def pack(sampling: SamplingParams, way: int, *, draws: int = 0) -> bytes:
    """The settings of a choice; a draw takes a word."""
    temperature = max(sampling.temperature, COLDEST)
    least = log(sampling.min_p) if sampling.min_p else -inf
    numbers = (draws, temperature, sampling.top_p, least)
    return _SETTINGS.pack(way, sampling.top_k, *numbers)


def memory_floats(size: int) -> int:
    """What choosing from a row takes."""
    return 5 * size + 64


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
