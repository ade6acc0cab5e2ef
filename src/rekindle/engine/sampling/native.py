"""Calls the compiled sampler, `rows.c`, which releases the interpreter's lock while it runs.

`hatch_build.py` compiles it when the package is built, if there is a C compiler.
"""

from __future__ import annotations

import ctypes
from ctypes import c_char, c_char_p, c_int32, c_int64, c_void_p
from enum import IntEnum
from functools import cache
from hashlib import sha256
from math import inf, log
from pathlib import Path
from struct import Struct
from typing import Any

import numpy as np

from rekindle.engine.base import Matrix
from rekindle.protocol.requests import SamplingParams

LIBRARY = Path(__file__).with_name("_rows.so")  # the only place that it is loaded from
UNDECIDED = -1  # returned in place of a token
MIN_TEMPERATURE = 1e-6  # a lower one is zero in float32
DRAWS = 2  # draws that may follow the proposals in one call
WORDS = 21 + DRAWS  # 64-bit random words of a row: three for each of seven proposals, one per draw

Ids = np.ndarray[Any, np.dtype[np.int32]]  # contiguous

_SETTINGS = Struct("=iiqdddd")
PARAMS_BYTES = _SETTINGS.size + 8 * WORDS


class Method(IntEnum):
    """How a token is chosen, as in `rows.c`."""

    GREEDY = 0
    PROPOSE = 1  # proposals by rejection, then draws
    DRAW = 2  # draws from the whole row


def pack(sampling: SamplingParams, method: Method, *, draws: int = 0) -> bytes:
    """Pack the settings of a row. `WORDS` random words have to follow them."""
    temperature = max(sampling.temperature, MIN_TEMPERATURE)
    min_score = log(sampling.min_p) if sampling.min_p else -inf
    typical = sampling.typical_p if sampling.typical_p < 1 else 0.0
    return _SETTINGS.pack(
        method, sampling.top_k, draws, temperature, sampling.top_p, min_score, typical
    )


def match_lengths(library: ctypes.CDLL, tokens: Ids) -> Ids:
    """For each place, count how many tokens up to it equal the last tokens of the text."""
    lengths = np.empty(tokens.size, np.int32)
    library.match_lengths(tokens.ctypes.data, tokens.size, lengths.ctypes.data)
    return lengths


class NativeSampler:
    """Samples the rows of a step, with several threads if asked for. Not thread-safe."""

    def __init__(self, library: ctypes.CDLL, threads: int) -> None:
        self._library = library
        self._threads = threads
        self._scratch = np.empty(0, np.float32)
        self._scratch_at, self._scratch_size = 0, -1  # its address, and the rows it is made for
        self._pool: int | None = library.open_pool(threads - 1) if threads > 1 else None

    def arm(self) -> None:
        """Wake the threads before a step, while its logits are being computed."""
        if self._pool:
            self._library.arm_pool(self._pool)

    def sample(self, params: bytes, logits: Matrix, *, parallel: bool = False) -> list[int]:
        """Return a token for each row, or `UNDECIDED`. `params` has `PARAMS_BYTES` for each row."""
        count, size = logits.shape
        if len(params) != count * PARAMS_BYTES:
            raise ValueError(f"{len(params)} bytes of parameters do not fit {count} rows")
        if not logits.flags.c_contiguous or logits.dtype != np.float32:
            raise ValueError("logits have to be contiguous rows of float32")
        if self._scratch_size < size:
            floats = self._threads * self._library.memory_floats(size)
            self._scratch = np.empty(floats, np.float32)
            self._scratch_at, self._scratch_size = self._scratch.ctypes.data, size
        tokens = (c_int32 * count)()
        args = (logits.ctypes.data, size, count, params, self._scratch_at, tokens)
        if self._pool and parallel:
            self._library.choose_tokens_together(self._pool, *args)
        else:
            self._library.choose_tokens(*args)
        return list(tokens)

    def close(self) -> None:
        if self._pool:
            self._library.close_pool(self._pool)
            self._pool = None


_STEP = [c_void_p, c_int64, c_int64, c_char_p, c_void_p, c_void_p]
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "memory_floats": (c_int64, [c_int64]),
    "choose_tokens": (None, _STEP),
    "match_lengths": (None, [c_void_p, c_int64, c_void_p]),
    "choose_tokens_together": (None, [c_void_p, *_STEP]),
    "open_pool": (c_void_p, [c_int64]),
    "arm_pool": (None, [c_void_p]),
    "close_pool": (None, [c_void_p]),
}


def load() -> ctypes.CDLL | None:
    found = _find()
    return None if isinstance(found, str) else found


def missing_reason() -> str | None:
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
    """Hash the C files in the same way as `hatch_build.py`."""
    sources = sorted(LIBRARY.parent.glob("*.[ch]"))
    return sha256(b"".join(each.read_bytes() for each in sources)).hexdigest()
