"""Identifies the caller of a request by its API key.

Keys are stored as digests. A lookup takes the same time for one key or many, and for a right or a
wrong key, because it depends only on the digest, which nobody can choose.
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

from rekindle.errors import ConfigError, Unauthorized

log = logging.getLogger("rekindle.keys")

LOOPBACK = {"localhost", "127.0.0.1", "::1"}
CALLER = "rekindle.caller"  # the caller's key in the request's scope
OPEN_SALT = b""  # for callers without a key: open servers, presets, the Python API
RELOAD_INTERVAL_S = 1.0

FileVersion = tuple[int, int, int] | None  # changes with the file; None if there is no file
KnownKeys = Mapping[bytes, bool]  # digest -> whether it is an admin key


@dataclass(frozen=True, slots=True)
class Caller:
    """A tenant, identified by the salt of its key. Admins may see the state of all tenants."""

    salt: bytes
    admin: bool

    @property
    def label(self) -> str:
        """How logs and metrics name the tenant: by a digest, as lists of entries do.

        Callers without a key have no name.
        """
        return blake3(self.salt).hexdigest()[:12] if self.salt else ""

    @property
    def is_unknown(self) -> bool:
        """Whether the server has API keys and this caller sent none."""
        return self.salt == OPEN_SALT and not self.admin


def key_digest(key: str) -> bytes:
    return blake3(key.encode(), derive_key_context="rekindle 2026 api key salt").digest()


def new_key() -> str:
    """Generate a random key of 256 bits."""
    return f"rk-{secrets.token_urlsafe(32)}"


def key_line(name: str, key: str, *, admin: bool) -> str:
    """Return the line of a key file for this key. It holds the digest, not the key."""
    if not re.fullmatch(r"[\w.@+-]{1,64}", name):
        raise ConfigError(
            f"{name!r} cannot name a key: use up to 64 letters, digits and the characters . @ + - _"
        )
    return f"{name} blake3:{key_digest(key).hex()}" + (" admin" if admin else "")


def append_key_line(path: Path, line: str) -> None:
    """Append a line. A new file is readable by its owner only."""
    try:
        text = path.read_bytes() if path.exists() else b""
        separator = "\n" if text and not text.endswith(b"\n") else ""
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(f"{separator}{line}\n")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None


class KeyFile:
    """A file of keys that may change while the server runs.

    Each line is `NAME DIGEST [admin]`. While the file is invalid, its previous keys stay in force.
    """

    def __init__(
        self, path: Path, clock: Callable[[], float] = time.monotonic, *, warns: bool = True
    ) -> None:
        self._path = path
        self._clock = clock
        self._checked_at_s = clock()
        self._version, self._keys = _read(path)
        if warns and path.stat().st_mode & 0o077:
            log.warning("other users can read %s; run `chmod 600 %s`", path, path)

    def keys(self) -> KnownKeys:
        now = self._clock()
        if now - self._checked_at_s >= RELOAD_INTERVAL_S:
            self._checked_at_s = now
            self._reload()
        return self._keys

    def _reload(self) -> None:
        version = _version(self._path)
        if version == self._version:
            return
        self._version = version  # so that an invalid file is logged once
        try:
            self._version, self._keys = _read(self._path)
        except ConfigError as error:
            log.error("%s; the previous keys stay in force", error)
        else:
            log.info("reloaded %s: %d keys", self._path, len(self._keys))


class Keys:
    """The API keys that a server accepts. Without any, the server is open to everybody."""

    def __init__(
        self, keys: Iterable[str] = (), *, admin: Iterable[str] = (), file: KeyFile | None = None
    ) -> None:
        self._given = dict.fromkeys(map(key_digest, keys), False)
        self._given |= dict.fromkeys(map(key_digest, admin), True)
        self._file = file

    @property
    def is_open(self) -> bool:
        """An empty key file does not open the server: it may have been emptied to revoke keys."""
        return not self._given and self._file is None

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
        known = [self._given, self._file.keys() if self._file else {}]
        found = [keys[digest] for keys in known if digest in keys]
        return Caller(digest, admin=any(found)) if found else None


def _bearer(authorization: str | None) -> str | None:
    scheme, _, key = (authorization or "").partition(" ")
    return key if scheme.lower() == "bearer" else None


def caller_of(request: Request) -> Caller:
    caller: Caller = request.scope[CALLER]
    return caller


def _version(path: Path) -> FileVersion:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _read(path: Path) -> tuple[FileVersion, KnownKeys]:
    version = _version(path)  # before reading, so that a write in between counts as a change
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the keys in {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not text in UTF-8") from None
    keys: dict[bytes, bool] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if words := line.partition("#")[0].split():
            digest, admin = _parse(path, number, words)
            keys[digest] = admin or keys.get(digest, False)
    return version, keys


def _parse(path: Path, number: int, words: list[str]) -> tuple[bytes, bool]:
    """Return a key's digest, and whether it is an admin key."""
    match words:
        case [_, digest, *role] if role in ([], ["admin"]):
            if re.fullmatch(r"blake3:[0-9a-f]{64}", digest):
                return bytes.fromhex(digest.removeprefix("blake3:")), bool(role)
    # The message does not quote the line, because the line may contain a key.
    raise ConfigError(
        f"line {number} of {path} is not a key: write `NAME DIGEST` or `NAME DIGEST admin`, "
        "as `rekindle key NAME` prints it"
    )
