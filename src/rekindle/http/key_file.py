"""Reads and extends the file of API keys, which may change while the server runs.

Each line is `NAME DIGEST [admin] [OPTION=VALUE ...]`. The first key of a tenant has no `tenant`
option: the digest of the key identifies the tenant. Further keys of the tenant name that digest.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from blake3 import blake3

from rekindle.errors import ConfigError
from rekindle.http.limits import NO_LIMITS, KeyLimits
from rekindle.protocol.settings import parse_size

log = logging.getLogger("rekindle.keys")

RELOAD_INTERVAL_S = 1.0
LIMITS = tuple(field.name for field in fields(KeyLimits))
NAME = r"[\w.@+-]{1,64}"

FileVersion = tuple[int, int, int] | None  # changes with the file; None if there is no file


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownKey:
    """A key as its line describes it. Keys with the same salt belong to one tenant."""

    name: str
    salt: bytes
    admin: bool = False
    groups: tuple[str, ...] = ()
    limits: KeyLimits = NO_LIMITS


KnownKeys = Mapping[bytes, KnownKey]  # by digest


def key_digest(key: str) -> bytes:
    return blake3(key.encode(), derive_key_context="rekindle 2026 api key salt").digest()


def new_key() -> str:
    """Generate a random key of 256 bits."""
    return f"rk-{secrets.token_urlsafe(32)}"


def key_line(name: str, key: str, *, admin: bool, options: Sequence[str] = ()) -> str:
    """Return the line of a key file for this key. It holds the digest, not the key."""
    if not re.fullmatch(NAME, name):
        raise ConfigError(
            f"{name!r} cannot name a key: use up to 64 letters, digits and the characters . @ + - _"
        )
    for option in options:
        _parse_option(option)
    return " ".join((name, _spelled(key_digest(key)), *(["admin"] if admin else []), *options))


def options_of_tenant(path: Path, name: str, options: Sequence[str]) -> list[str] | None:
    """The options of another key for the tenant of this name: the tenant, and the options of its
    last line unless they are given again. None: no line has the name."""
    known = [key for key in _read(path)[1].values() if key.name == name] if path.exists() else []
    if not known:
        return None
    if len({key.salt for key in known}) > 1:
        raise ConfigError(
            f"{name} is the name of several tenants in {path}: choose another name, or write the "
            "line yourself with the option tenant=DIGEST of the tenant that you mean"
        )
    given = {option.partition("=")[0] for option in options}
    kept = [option for option in _options(known[-1]) if option.partition("=")[0] not in given]
    return [f"tenant={_spelled(known[-1].salt)}", *kept, *options]


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


def remove_tenant(path: Path, name: str) -> list[str]:
    """Remove the lines of a tenant's keys. Returns the digests that identify the tenant."""
    known = _read(path)[1]
    salts = dict.fromkeys(key.salt for key in known.values() if key.name == name)
    if not salts:
        raise ConfigError(f"no line of {path} has the name {name}")
    kept = [
        line
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if not (words := line.partition("#")[0].split())
        or _parse(path, number, words)[1].salt not in salts
    ]
    new = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write("".join(f"{line}\n" for line in kept))
            file.flush()
            os.fsync(descriptor)
        new.replace(path)
    except OSError as error:
        new.unlink(missing_ok=True)
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
    return [_spelled(salt) for salt in salts]


class KeyFile:
    """A file of keys that may change while the server runs. While the file is invalid, its previous
    keys stay in force."""

    def __init__(
        self, path: Path, clock: Callable[[], float] = time.monotonic, *, warns: bool = True
    ) -> None:
        self.path = path
        self._clock = clock
        self._checked_at_s = clock()
        self._version, self._keys = _read(path)
        if warns and path.stat().st_mode & 0o077:
            log.warning("other users can read %s; run `chmod 600 %s`", path, path)

    def keys(self) -> KnownKeys:
        now = self._clock()
        if now - self._checked_at_s >= RELOAD_INTERVAL_S:
            self._checked_at_s = now
            self.reload()
        return self._keys

    def reload(self) -> None:
        """Read the file again if it has changed."""
        version = _version(self.path)
        if version == self._version:
            return
        self._version = version  # so that an invalid file is logged once
        try:
            self._version, self._keys = _read(self.path)
        except ConfigError as error:
            log.error("%s; the previous keys stay in force", error)
        else:
            log.info("reloaded %s: %d keys", self.path, len(self._keys))


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
    keys: dict[bytes, KnownKey] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if words := line.partition("#")[0].split():
            digest, key = _parse(path, number, words)
            is_admin = key.admin or (digest in keys and keys[digest].admin)
            keys[digest] = KnownKey(
                name=key.name, salt=key.salt, admin=is_admin, groups=key.groups, limits=key.limits
            )
    return version, keys


def _parse(path: Path, number: int, words: list[str]) -> tuple[bytes, KnownKey]:
    """Return a key's digest, and the key. The messages do not quote the line, because the line may
    contain a key."""
    where = f"line {number} of {path}"
    digest = parse_digest(words[1]) if len(words) > 1 else None
    rest = words[2:]
    is_admin = rest[:1] == ["admin"]
    options = rest[1:] if is_admin else rest
    if digest is None or not all("=" in option for option in options):
        raise ConfigError(
            f"{where} is not a key: write `NAME DIGEST` or `NAME DIGEST admin`, with options such "
            "as requests_per_minute=60 behind it, as `rekindle key NAME` prints it"
        )
    try:
        parsed = dict(map(_parse_option, options))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    salt, groups = parsed.pop("tenant", digest), parsed.pop("group", ())
    key = KnownKey(
        name=words[0], salt=salt, admin=is_admin, groups=groups, limits=KeyLimits(**parsed)
    )
    return digest, key


def _parse_option(option: str) -> tuple[str, Any]:
    name, _, value = option.partition("=")
    match name:
        case "tenant":
            parsed: Any = parse_digest(value)
            wanted = "the digest of another key, such as blake3:…"
        case "group":
            parsed, wanted = _parse_names(value, NAME), "names of groups, with commas between them"
        case "models":
            parsed, wanted = _parse_names(value, r"\S+"), "names of models, with commas between"
        case "cache_bytes":
            parsed, wanted = _parse_bytes(value), "a size such as 2GB"
        case _ if name in LIMITS:
            parsed = int(value) if re.fullmatch(r"[1-9]\d{0,11}", value) else None
            wanted = "a whole number from 1"
        case _:
            known = ", ".join(("tenant", "group", *LIMITS))
            raise ConfigError(f"a key has no such option; the options are {known}")
    if parsed is None:
        raise ConfigError(f"the option {name} takes {wanted}")
    return name, parsed


def parse_digest(text: str) -> bytes | None:
    is_digest = re.fullmatch(r"blake3:[0-9a-f]{64}", text)
    return bytes.fromhex(text.removeprefix("blake3:")) if is_digest else None


def _parse_names(text: str, pattern: str) -> tuple[str, ...] | None:
    names = tuple(text.split(","))
    return names if all(re.fullmatch(pattern, name) for name in names) else None


def _parse_bytes(text: str) -> int | None:
    try:
        size = parse_size(text)
    except ValueError:
        return None
    return size if isinstance(size, int) and size > 0 else None


def _spelled(digest: bytes) -> str:
    return f"blake3:{digest.hex()}"


def _options(key: KnownKey) -> Iterable[str]:
    """The options of a key, other than its tenant, as its line spells them."""
    if key.groups:
        yield f"group={','.join(key.groups)}"
    for name in LIMITS:
        value = getattr(key.limits, name)
        if value is not None:
            yield f"{name}={','.join(value) if isinstance(value, tuple) else value}"
