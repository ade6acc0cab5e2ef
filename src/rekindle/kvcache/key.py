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


def namespace(fingerprint: bytes, salt: bytes, block_tokens: int, secret: bytes = b"") -> bytes:
    """The root of every chain whose states may stand in for each other. Without the server's
    secret nobody can tell whose it is."""
    return _digest(b"namespace", secret, fingerprint, salt, block_tokens.to_bytes(4, "big"))


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
    most = min(len(one), len(other)) // TOKEN_BYTES
    if not most:
        return 0
    differ = np.frombuffer(one, np.uint32, most) != np.frombuffer(other, np.uint32, most)
    first = int(differ.argmax())  # 0 also when nothing differs
    return first if differ[first] else most
