"""Who sent a request: API keys, kept as digests and found by them.

A look-up takes as long for ten thousand keys as for one, and as long for a wrong key as for a right
one: its time depends on digests, which nobody can choose. A file of keys has a line
`NAME DIGEST [admin]` for each; it may change while the server runs.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3
from starlette.requests import Request
from starlette.types import Scope

from rekindle.config import Config
from rekindle.errors import ConfigError, Unauthorized

log = logging.getLogger("rekindle.keys")

LOOPBACK = {"localhost", "127.0.0.1", "::1"}
CALLER = "rekindle.caller"  # the key under which a request's scope holds it
OPEN_SALT = b""  # of callers without a key: an open server, presets, the Python API
CHECK_EVERY_S = 1.0
KEY_BYTES = 32
ADMIN = "admin"

_NAME = re.compile(r"[\w.@+-]{1,64}")
_DIGEST = re.compile(r"blake3:([0-9a-f]{64})")

Stamp = tuple[int, int, int] | None  # changes with the file; None: there is no file


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose state a request may touch: that of its salt, or for an admin everybody's."""

    salt: bytes
    admin: bool


KnownKeys = Mapping[bytes, bool]  # digests, and whether they are an admin's


def key_digest(key: str) -> bytes:
    return blake3(key.encode(), derive_key_context="rekindle 2026 api key salt").digest()


def new_key() -> str:
    """A random key of 256 bits."""
    return f"rk-{secrets.token_urlsafe(KEY_BYTES)}"


def key_line(name: str, key: str, *, admin: bool) -> str:
    """The key's line in a key file; the key cannot be read back from it."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} cannot name a key: use up to 64 letters, digits and the characters . @ + - _"
        )
    return f"{name} blake3:{key_digest(key).hex()}" + (f" {ADMIN}" if admin else "")


def append_key_line(path: Path, line: str) -> None:
    """Add the line; a new file is readable by its owner alone."""
    try:
        torn = path.exists() and not path.read_bytes().endswith(b"\n") and path.stat().st_size > 0
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(("\n" if torn else "") + line + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None


class KeyFile:
    """The file's current keys; while the file is invalid, those it had before."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._checked_at_s = clock()
        self._stamp, self._keys = _read(path)
        if path.stat().st_mode & 0o077:
            log.warning("others on this machine may open %s; run `chmod 600 %s`", path, path)

    def keys(self) -> KnownKeys:
        now = self._clock()
        if now - self._checked_at_s >= CHECK_EVERY_S:
            self._checked_at_s = now
            self._reload()
        return self._keys

    def _reload(self) -> None:
        stamp = _stamp(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp  # an invalid file is logged once
        try:
            self._stamp, self._keys = _read(self._path)
        except ConfigError as error:
            log.error("%s; the keys read before stay in force", error)
        else:
            log.info("%s has changed: %d keys", self._path, len(self._keys))


class Keys:
    """The API keys a server accepts. A server without any is open to everybody."""

    def __init__(
        self, keys: Iterable[str] = (), *, admin: Iterable[str] = (), file: KeyFile | None = None
    ) -> None:
        self._given = dict.fromkeys(map(key_digest, keys), False)
        self._given |= dict.fromkeys(map(key_digest, admin), True)
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

    def caller(self, authorization: str | None, api_key: str | None = None) -> Caller:
        """Who holds the key in one of these headers; raises Unauthorized when none is known."""
        if self.is_open:
            return Caller(OPEN_SALT, admin=True)
        for key in (_bearer(authorization), api_key):
            if key and (caller := self._find(key_digest(key.strip()))):
                return caller
        raise Unauthorized(
            "This server needs an API key: send the header `Authorization: Bearer KEY` or "
            "`x-api-key: KEY`."
        )

    def _find(self, digest: bytes) -> Caller | None:
        known = [self._given, self._file.keys() if self._file else {}]
        found = [keys[digest] for keys in known if digest in keys]
        return Caller(digest, admin=any(found)) if found else None


def _bearer(authorization: str | None) -> str | None:
    scheme, _, key = (authorization or "").partition(" ")
    return key if scheme.lower() == "bearer" else None


def set_caller(scope: Scope, caller: Caller) -> None:
    scope[CALLER] = caller


def caller_of(request: Request) -> Caller:
    """Who the middleware found to have sent this request."""
    caller: Caller = request.scope[CALLER]
    return caller


def _stamp(path: Path) -> Stamp:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _read(path: Path) -> tuple[Stamp, KnownKeys]:
    """The stamp is taken before reading, so that a write in between counts as a change."""
    stamp = _stamp(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the keys in {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not text in UTF-8") from None
    numbered = enumerate((line.partition("#")[0].split() for line in text.splitlines()), 1)
    keys: dict[bytes, bool] = {}
    for number, words in numbered:
        if words:
            digest, admin = _parse(path, number, words)
            keys[digest] = admin or keys.get(digest, False)
    return stamp, keys


def _parse(path: Path, number: int, words: list[str]) -> tuple[bytes, bool]:
    """A key's digest, and whether it is an admin's."""
    match words:
        case [_name, digest, *role] if role in ([], [ADMIN]) and _DIGEST.fullmatch(digest):
            return bytes.fromhex(digest.removeprefix("blake3:")), bool(role)
    # The line itself is not repeated: it may contain a key.
    raise ConfigError(
        f"line {number} of {path} is no key: write `NAME DIGEST` or `NAME DIGEST {ADMIN}`, "
        "as `rekindle key NAME` prints it"
    )
