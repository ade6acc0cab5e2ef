"""Random numbers that depend on a reply's seed and on the number of the token alone."""

from __future__ import annotations

import secrets
from collections.abc import Sequence as Seq
from hashlib import blake2b, shake_128

import numpy as np

from rekindle.engine.weighted_rows import PROPOSALS, UNIFORMS, Doubles

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
