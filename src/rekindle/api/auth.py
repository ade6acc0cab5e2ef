"""Who is asking. Keys are kept as digests and compared in constant time."""

from __future__ import annotations

import hmac
from collections.abc import Iterable

from blake3 import blake3
from starlette.requests import Request

from rekindle.errors import Unauthorized

LOOPBACK = {"localhost", "127.0.0.1", "::1"}


class Keys:
    """The API keys a server accepts; none at all means everybody may ask."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def salt(self, authorization: str | None) -> bytes:
        """The asking key's own salt, by which its state is kept apart; raises Unauthorized."""
        if not self._digests:
            return b""
        scheme, _, key = (authorization or "").partition(" ")
        presented = _digest(key.strip())
        matches = [hmac.compare_digest(presented, known) for known in self._digests]
        if scheme.lower() != "bearer" or not any(matches):
            raise Unauthorized(
                "This server needs an API key: send the header `Authorization: Bearer KEY`."
            )
        return presented


def _digest(key: str) -> bytes:
    return blake3(key.encode(), derive_key_context="rekindle 2026 api key salt").digest()


def salt_of(request: Request) -> bytes:
    """The salt that the guard found for this request."""
    salt: bytes = request.scope["rekindle.salt"]
    return salt
