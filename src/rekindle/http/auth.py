"""Identifies the caller of a request by its API key.

Keys are stored as digests. A lookup takes the same time for one key or many, and for a right or a
wrong key, because it depends only on the digest, which nobody can choose.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from starlette.requests import Request

from rekindle.errors import Unauthorized
from rekindle.http.key_file import KeyFile, KnownKey, KnownKeys, key_digest
from rekindle.http.limits import NO_LIMITS, KeyLimits

LOOPBACK = {"localhost", "127.0.0.1", "::1"}
CALLER = "rekindle.caller"  # the caller's key in the request's scope
KEYS = "keys"  # the Keys' name in the application's state
OPEN_SALT = b""  # for callers without a key: open servers, presets, the Python API


@dataclass(frozen=True, slots=True)
class Caller:
    """A tenant, identified by its salt. Admins may see the state of all tenants."""

    salt: bytes
    admin: bool
    name: str = ""  # of the tenant; empty without a key
    groups: tuple[str, ...] = ()  # whose shared prompts it may reuse
    limits: KeyLimits = NO_LIMITS

    @property
    def is_unknown(self) -> bool:
        """Whether the server has API keys and this caller sent none."""
        return self.salt == OPEN_SALT and not self.admin


class Keys:
    """The API keys that a server accepts. Without any, the server is open to everybody."""

    def __init__(
        self, keys: Iterable[str] = (), *, admin: Iterable[str] = (), file: KeyFile | None = None
    ) -> None:
        self._given: KnownKeys = {}
        self._file = file
        self.replace(keys, admin=admin)

    def replace(self, keys: Iterable[str], *, admin: Iterable[str]) -> None:
        """Replace the keys that were given as settings, and read the file again."""
        given = {key_digest(key): False for key in keys}
        given |= {key_digest(key): True for key in admin}
        self._given = {
            digest: KnownKey(name=_default_name(digest), salt=digest, admin=is_admin)
            for digest, is_admin in given.items()
        }
        if self._file is not None:
            self._file.reload()

    @property
    def is_open(self) -> bool:
        """An empty key file does not open the server: it may have been emptied to revoke keys."""
        return not self._given and self._file is None

    @property
    def known(self) -> Iterator[KnownKey]:
        """All keys, those of the file first. One digest may occur twice."""
        yield from self._file.keys().values() if self._file else ()
        yield from self._given.values()

    def caller(self, authorization: str | None, api_key: str | None = None) -> Caller:
        """Return the caller whose key is in one of these headers, or raise Unauthorized."""
        if self.is_open:
            return Caller(OPEN_SALT, admin=True)
        sent = [key for key in (_bearer(authorization), api_key) if key]
        for key in sent:
            if caller := self._find(key_digest(key.strip())):
                return caller
        if sent:
            raise Unauthorized("The API key is wrong: this server does not know it.")
        raise Unauthorized(
            "This server needs an API key: send the header `Authorization: Bearer KEY` or "
            "`x-api-key: KEY`."
        )

    def _find(self, digest: bytes) -> Caller | None:
        """A key in the file has its name and limits from there, even if it is also a setting."""
        tables = [self._file.keys() if self._file else {}, self._given]
        found = [keys[digest] for keys in tables if digest in keys]
        if not found:
            return None
        first, is_admin = found[0], any(each.admin for each in found)
        return Caller(first.salt, is_admin, first.name, first.groups, first.limits)


def _default_name(digest: bytes) -> str:
    """Name a key that was given as a setting, without showing the key."""
    return f"key-{digest.hex()[:8]}"


def _bearer(authorization: str | None) -> str | None:
    scheme, _, key = (authorization or "").partition(" ")
    return key if scheme.lower() == "bearer" else None


def keys_of(request: Request) -> Keys:
    keys: Keys = getattr(request.state, KEYS)
    return keys


def caller_of(request: Request) -> Caller:
    caller: Caller = request.scope[CALLER]
    return caller
