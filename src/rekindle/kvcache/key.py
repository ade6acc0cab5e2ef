"""Names of blocks: a chain of hashes that begins in a namespace."""

from __future__ import annotations

from blake3 import blake3

from rekindle.tokens import Tokens

KEY_BYTES = 32


def namespace(fingerprint: bytes, salt: bytes, block_tokens: int, secret: bytes = b"") -> bytes:
    """The parent of every chain whose states may stand in for each other. Without the server's
    secret nobody can tell whose it is."""
    return _digest(b"namespace", secret, fingerprint, salt, block_tokens.to_bytes(4, "big"))


def chain_key(parent: bytes, tokens: Tokens) -> bytes:
    """The block that holds these tokens after everything `parent` stands for."""
    return _digest(b"block", parent, tokens.packed)


def _digest(*parts: bytes) -> bytes:
    """Each part is framed by its length: ("ab", "c") and ("a", "bc") never meet."""
    hasher = blake3()
    for part in parts:
        hasher.update(len(part).to_bytes(8, "big"))
        hasher.update(part)
    return hasher.digest()
