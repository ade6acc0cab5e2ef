"""Tokens chosen by compiled code, `rows.c`, which holds no lock of the interpreter meanwhile.

The code is compiled when the package is built, where there is a C compiler (`hatch_build.py`).
"""

from __future__ import annotations

import ctypes
from ctypes import c_char, c_char_p, c_int32, c_int64, c_void_p
from functools import cache
from hashlib import sha256
from math import inf, log
from pathlib import Path
from struct import Struct
from typing import Any

import numpy as np

from rekindle.engine.base import Matrix
from rekindle.protocol.requests import SamplingParams

LIBRARY = Path(__file__).with_name("_rows.so")  # looked for nowhere else
GREEDY, PROPOSE, DRAW = range(3)  # ways to choose
UNDECIDED = -1  # in place of a token
COLDEST = 1e-6  # a lower temperature is 0 in float32
DRAWS = 2  # that may follow proposals

_SETTINGS = Struct("=iiqddd")
WORDS = 21 + DRAWS  # of 64 random bits, after the settings
CHOICE_BYTES = _SETTINGS.size + 8 * WORDS


class Memory:
    """What choosing takes, for each of some threads."""

    def __init__(self, library: ctypes.CDLL, threads: int) -> None:
        self._needed_floats = library.memory_floats
        self._threads = threads
        self._size = -1
        self._address = 0

    def address(self, size: int) -> int:
        """For rows of this size."""
        if self._size < size:
            self._floats = np.empty(self._threads * self._needed_floats(size), np.float32)
            self._address = self._floats.ctypes.data
            self._size = size
        return self._address


class RowChooser:
    """Chooses from the rows of a step, on several threads if there is more than one. One thread at
    a time may ask."""

    def __init__(self, library: ctypes.CDLL, threads: int) -> None:
        self._library = library
        self._memory = Memory(library, threads)
        self._pool: int | None = library.open_pool(threads - 1) if threads > 1 else None

    def arm(self) -> None:
        """Wake the threads ahead of a step whose logits are being computed."""
        if self._pool:
            self._library.arm_pool(self._pool)

    def choose(self, choices: bytes, logits: Matrix, *, together: bool = False) -> list[int]:
        """A token of each row, or `UNDECIDED`: settings and random words are given for each."""
        count, size = logits.shape
        if len(choices) != count * CHOICE_BYTES:
            raise ValueError(f"{len(choices)} bytes are not the choices of {count} rows")
        if not logits.flags.c_contiguous or logits.dtype != np.float32:
            raise ValueError("logits are rows of float32, one after the other")
        tokens = (c_int32 * count)()
        given = (logits.ctypes.data, size, count, choices, self._memory.address(size), tokens)
        if self._pool and together:
            self._library.choose_tokens_together(self._pool, *given)
        else:
            self._library.choose_tokens(*given)
        return list(tokens)

    def close(self) -> None:
        if self._pool:
            self._library.close_pool(self._pool)
            self._pool = None


def pack(sampling: SamplingParams, way: int, *, draws: int = 0) -> bytes:
    """The settings of a choice; a draw takes a word."""
    temperature = max(sampling.temperature, COLDEST)
    least = log(sampling.min_p) if sampling.min_p else -inf
    numbers = (draws, temperature, sampling.top_p, least)
    return _SETTINGS.pack(way, sampling.top_k, *numbers)


_GIVEN = [c_void_p, c_int64, c_int64, c_char_p, c_void_p, c_void_p]
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "memory_floats": (c_int64, [c_int64]),
    "choose_tokens": (None, _GIVEN),
    "choose_tokens_together": (None, [c_void_p, *_GIVEN]),
    "open_pool": (c_void_p, [c_int64]),
    "arm_pool": (None, [c_void_p]),
    "close_pool": (None, [c_void_p]),
}


def load() -> ctypes.CDLL | None:
    """None where there is none of this version."""
    found = _find()
    return None if isinstance(found, str) else found


def trouble() -> str | None:
    """Why there is no compiled code."""
    found = _find()
    return found if isinstance(found, str) else None


@cache
def _find() -> ctypes.CDLL | str:
    if not LIBRARY.exists():
        return "no C compiler was found when rekindle was installed"
    try:
        library = ctypes.CDLL(str(LIBRARY))
        compiled_from = (c_char * 64).in_dll(library, "source_hash").value
        if compiled_from.decode() != _hash_sources():
            return f"{LIBRARY} was compiled from other sources"
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, ValueError, AttributeError) as error:
        return f"the compiled code cannot be loaded: {error}"
    return library


def _hash_sources() -> str:
    """As `hatch_build.py` does."""
    sources = sorted(LIBRARY.parent.glob("*.[ch]"))
    return sha256(b"".join(each.read_bytes() for each in sources)).hexdigest()


def build(threads: int = 1) -> RowChooser | None:
    """None where there is no compiled code."""
    library = load()
    return None if library is None else RowChooser(library, threads)
