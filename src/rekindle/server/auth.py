"""Who is asking. Keys are kept as digests and compared in constant time."""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from dataclasses import dataclass

from starlette.requests import Request

from rekindle.config import Config
from rekindle.errors import Unauthorized
from rekindle.server.keyfile import Key, KeyFile, digest_of

LOOPBACK = {"localhost", "127.0.0.1", "::1"}


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose state a request may touch: what the salt keeps apart, or for an admin everybody's."""

    salt: bytes
    admin: bool


class Keys:
    """The API keys a server accepts. A server that was given none is open to everybody."""

    def __init__(
        self, keys: Iterable[str] = (), *, admin: Iterable[str] = (), file: KeyFile | None = None
    ) -> None:
        self._given = [Key(digest_of(key), admin=False) for key in keys]
        self._given += [Key(digest_of(key), admin=True) for key in admin]
        self._file = file

    @classmethod
    def of(cls, config: Config) -> Keys:
        """Raises ConfigError when the file of keys cannot be read."""
        file = KeyFile(config.api_keys_file) if config.api_keys_file else None
        return cls(config.api_key, admin=config.admin_key, file=file)

    @property
    def is_open(self) -> bool:
        """A file that holds no key is no open door: it may have been emptied to lock one out."""
        return not self._given and self._file is None

    def caller(self, authorization: str | None) -> Caller:
        """Who has the presented key; raises Unauthorized when nobody has it."""
        if self.is_open:
            return Caller(b"", admin=True)
        scheme, _, key = (authorization or "").partition(" ")
        presented = digest_of(key.strip())
        known = [*self._given, *(self._file.keys() if self._file else ())]
        matches = [each for each in known if hmac.compare_digest(presented, each.digest)]
        if scheme.lower() != "bearer" or not matches:
            raise Unauthorized(
                "This server needs an API key: send the header `Authorization: Bearer KEY`."
            )
        return Caller(presented, admin=any(each.admin for each in matches))


def salt_of(request: Request) -> bytes:
    """The salt that the guard found for this request."""
    salt: bytes = request.scope["rekindle.salt"]
    return salt


def admin_of(request: Request) -> bool:
    """Whether the guard found this request to be an administrator's; all are on an open server."""
    admin: bool = request.scope["rekindle.cli.cache_client"]
    return admin
