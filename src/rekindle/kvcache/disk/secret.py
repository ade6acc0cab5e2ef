"""Reads the secret that authenticates blocks, or creates one in the cache folder.

Two machines with the same configured secret can verify each other's blocks.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path

from rekindle.errors import ConfigError
from rekindle.kvcache.disk.files import sync_path

SECRET_BYTES = 32


def parse_secret(raw: bytes) -> bytes:
    """Parse the content of a secret file: 32 raw bytes, or 64 hexadecimal digits."""
    if len(raw) == SECRET_BYTES:
        return raw
    digits = raw.strip()
    if len(digits) == 2 * SECRET_BYTES:
        with suppress(ValueError):
            return bytes.fromhex(digits.decode("ascii"))
    raise ConfigError(
        f"a secret is {SECRET_BYTES} bytes or {2 * SECRET_BYTES} hexadecimal digits; "
        f"this one has {len(raw)} bytes"
    )


def read_secret_file(path: Path) -> bytes:
    """Read the secret file that is named in the settings."""
    try:
        with path.open("rb") as file:
            return parse_secret(file.read(1024))
    except OSError as error:
        raise ConfigError(f"cannot read the cache secret {path}: {error.strerror}") from None
    except ConfigError as error:
        raise ConfigError(f"cannot use the cache secret {path}: {error}") from None


def read_secret(cache_dir: Path, configured: bytes | None = None) -> bytes:
    """The secret of this cache, created if needed. Processes that start together agree on one."""
    cache_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    if configured is not None:
        return configured
    path = cache_dir / "secret"
    with suppress(FileNotFoundError):
        return _read_own(path)
    new = cache_dir / f".secret.{secrets.token_hex(8)}.tmp"
    try:
        handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(secrets.token_bytes(SECRET_BYTES))
            file.flush()
            os.fsync(handle)
        with suppress(FileExistsError):  # the first process wins
            path.hardlink_to(new)
    finally:
        new.unlink(missing_ok=True)
    sync_path(cache_dir.resolve())
    return _read_own(path)


def _read_own(path: Path) -> bytes:
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(handle, "rb") as file:
        secret = file.read(SECRET_BYTES + 1)
    if len(secret) != SECRET_BYTES:
        raise ConfigError(
            f"{path} must hold {SECRET_BYTES} bytes and does not. Remove it to have a new secret "
            "made; blocks stored under the old one are then computed again."
        )
    return secret
