"""Names of blocks: a chain of hashes, rooted in a namespace."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from blake3 import blake3

TOKEN_BYTES = 4
KEY_BYTES = 32


def pack(tokens: Sequence[int]) -> bytes:
    """Tokens as bytes, big-endian, so that byte order is token order."""
    return np.asarray(tokens, dtype=">u4").tobytes()


def unpack(packed: bytes) -> list[int]:
    tokens: list[int] = np.frombuffer(packed, dtype=">u4").tolist()
    return tokens


def namespace(fingerprint: bytes, salt: bytes, block_tokens: int) -> bytes:
    """The root of every chain whose states may stand in for each other."""
    return _digest(b"namespace", fingerprint, salt, block_tokens.to_bytes(4, "big"))


def chain_key(parent: bytes, packed: bytes) -> bytes:
    """The block that holds these tokens after everything `parent` stands for."""
    return _digest(b"block", parent, packed)


def _digest(*parts: bytes) -> bytes:
    """Each part is framed by its length: ("ab", "c") and ("a", "bc") never meet."""
    hasher = blake3()
    for part in parts:
        hasher.update(len(part).to_bytes(8, "big"))
        hasher.update(part)
    return hasher.digest()


def shared_prefix(one: bytes | bytearray, other: bytes | bytearray) -> int:
    """How many leading tokens two packed runs have in common."""
    left, right = memoryview(one), memoryview(other)
    low, high = 0, min(len(left), len(right)) // TOKEN_BYTES
    if left[: high * TOKEN_BYTES] == right[: high * TOKEN_BYTES]:
        return high
    while high - low > 1:  # invariant: equal up to low, different somewhere before high
        middle = (low + high) // 2
        if (
            left[low * TOKEN_BYTES : middle * TOKEN_BYTES]
            == (right[low * TOKEN_BYTES : middle * TOKEN_BYTES])
        ):
            low = middle
        else:
            high = middle
    return low
