"""Who sent a request. Keys are kept as digests and compared in constant time."""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from dataclasses import dataclass

from starlette.requests import Request
from starlette.types import Scope

from rekindle.config import Config
from rekindle.errors import Unauthorized
from rekindle.server.keyfile import Key, KeyFile, digest_of

LOOPBACK = {"localhost", "127.0.0.1", "::1"}
CALLER = "rekindle.caller"  # the key under which a request's scope holds it


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose state a request may touch: that of its salt, or for an admin everybody's."""

    salt: bytes
    admin: bool


class Keys:
    """The API keys a server accepts. A server without any is open to everybody."""

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
        """A file without keys does not open the server: it may have been emptied to revoke them."""
        return not self._given and self._file is None

    def caller(self, authorization: str | None) -> Caller:
        """Who holds the presented key; raises Unauthorized when it is not known."""
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


def set_caller(scope: Scope, caller: Caller) -> None:
    scope[CALLER] = caller


def caller_of(request: Request) -> Caller:
    """Who the middleware found to have sent this request."""
    caller: Caller = request.scope[CALLER]
    return caller
