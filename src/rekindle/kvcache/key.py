"""Names of blocks: a chain of hashes that begins in a namespace."""

from __future__ import annotations

from blake3 import blake3

from rekindle.tokens import Tokens

KEY_BYTES = 32


def namespace(fingerprint: bytes, salt: bytes, block_tokens: int, secret: bytes = b"") -> bytes:
    """The parent of every chain whose states may stand in for each other. Without the server's
    secret nobody can tell whose it is."""
    parts = (b"namespace", secret, fingerprint, salt, block_tokens.to_bytes(4, "big"))
    return blake3(b"".join(map(_framed, parts))).digest()


def chain_key(parent: bytes, tokens: Tokens) -> bytes:
    """The block that holds these tokens after everything `parent` stands for."""
    return blake3(_BLOCK + _framed(parent) + _framed(tokens.packed)).digest()


def _framed(part: bytes) -> bytes:
    """With its length before it: ("ab", "c") and ("a", "bc") never meet."""
    return len(part).to_bytes(8, "big") + part


_BLOCK = _framed(b"block")
