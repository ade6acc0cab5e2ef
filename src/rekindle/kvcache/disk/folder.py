"""Opens the cache folder of one model: takes its lock, recovers it, and limits its size.

<cache_dir>/lock                    held while folders are locked or removed
<cache_dir>/secret                  32 random bytes, unless a secret is configured
<cache_dir>/<model>/lock            held while a process uses this folder
<cache_dir>/<model>/model           the name of the model
<cache_dir>/<model>/index.db        the index, its backup, and an index that was set aside
<cache_dir>/<model>/learnt          what eviction has learned
<cache_dir>/<model>/seal            a digest of the configured secret; absent: the cache's own
<cache_dir>/<model>/blocks/         the block files
<cache_dir>/<model>/pictures/       encoded images of a vision model
<cache_dir>/<model>/aside/          bad files, kept for inspection
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import sqlite3
import stat
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from blake3 import blake3

from rekindle.errors import FolderLocked, IndexDamaged
from rekindle.kvcache.disk.block_files import BlockFiles
from rekindle.kvcache.disk.entry_table import BlockRow, EntryRow
from rekindle.kvcache.disk.files import Files, make_folder, sync_path
from rekindle.kvcache.disk.index_db import BACKUP, IndexDb, beside
from rekindle.kvcache.disk.policy_state import PolicyState, read_policy_state
from rekindle.kvcache.disk.recovery import OpenIndex, Recovery, recover
from rekindle.kvcache.disk.secret import read_secret

INDEX = "index.db"
QUARANTINE = "aside"
_LOCK = "lock"
_NAME = "model"
_SEAL = "seal"
_MODEL = re.compile("[0-9a-f]{32}")


@dataclass(slots=True)
class Folder:
    """A folder that is locked for this process until it is closed."""

    path: Path
    block_files: BlockFiles
    index_db: IndexDb
    limit_bytes: int
    recovery: Recovery
    superseded_bytes: int  # in folders of this model that its current settings cannot use
    policy_state: PolicyState  # of the previous process
    _resources: ExitStack = field(repr=False)
    _listed: OpenIndex | None = field(repr=False)

    def take_listed(self) -> tuple[list[BlockRow], list[EntryRow]]:
        """The blocks, parents first, and the entries. The first call returns the rows that were
        read when the index was opened, so that they do not stay in memory."""
        listed, self._listed = self._listed, None
        if listed is not None:
            return listed.blocks, listed.entries
        return self.index_db.blocks(), self.index_db.entries()

    def close(self) -> None:
        self._resources.close()


def open_folder(
    cache_dir: Path,
    identity: bytes,
    *,
    limit_bytes: int,
    served: Sequence[str] = ("",),
    secret: bytes | None = None,
) -> Folder:
    """Lock and open a model's folder, or raise FolderLocked. `limit_bytes` is for all of
    `cache_dir`.

    `secret` is the configured one. `served` are the models of this server, this one first. The
    folders of the others are recognised by the names that they had last time.
    """
    configured, secret = secret, read_secret(cache_dir, secret)
    home = cache_dir.resolve()
    with ExitStack() as resources:
        with gate(home):
            # Another secret gets another folder, because it could not verify anything in this one.
            path = _choose_path(home, identity + (configured or b""), served)
            lock = _claim_new(path)
            resources.callback(os.close, lock)
            limit, superseded_bytes = _make_room(path, served, limit_bytes)
            _write_name(path / _NAME, served[0])
        if configured is not None:
            _write_name(path / _SEAL, _seal(configured))
        _touch(lock)
        resources.callback(_touch, lock)
        block_files = open_block_files(path, secret, resources, min(64 << 20, limit // 16))
        index, recovery = recover(block_files, path / INDEX)
        resources.callback(index.index_db.close)
        return Folder(
            path,
            block_files,
            index.index_db,
            limit,
            recovery,
            superseded_bytes,
            read_policy_state(path),
            resources.pop_all(),
            index,
        )


def _choose_path(home: Path, identity: bytes, served: Sequence[str]) -> Path:
    """Return the folder of this state, or a separate one for this model if the folder belongs to
    another model of the server. Two models can have equal state if only their templates differ."""
    shared, own = (
        home / blake3(content).hexdigest()[:32]
        for content in (identity, identity + os.fsencode(served[0]))
    )
    others = [name for name in served if name != served[0]]
    return own if own.is_dir() or _read_name(shared / _NAME) in others else shared


def secret_of(path: Path, configured: bytes | None) -> bytes | None:
    """The secret that a folder's blocks are sealed with, or None if it is unknown."""
    try:
        seal = (path / _SEAL).read_text()
    except OSError:
        return read_secret(path.parent)
    return configured if configured is not None and seal == _seal(configured) else None


def _seal(secret: bytes) -> str:
    return blake3(secret, derive_key_context="rekindle cache folder seal 1").hexdigest()


def open_block_files(
    path: Path, secret: bytes, resources: ExitStack, max_quarantine_bytes: int = 64 << 20
) -> BlockFiles:
    blocks, quarantine = Files(path / "blocks"), Files(path / QUARANTINE)
    resources.callback(blocks.close)
    resources.callback(quarantine.close)
    return BlockFiles(blocks, secret, quarantine, max_quarantine_bytes)


@contextmanager
def gate(home: Path) -> Iterator[None]:
    """Let one process at a time lock or remove folders."""
    handle = _open_lock(home / _LOCK)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def claim(folder: Path) -> int:
    """Lock a folder while the returned handle is open. Call within `gate`."""
    handle = _open_lock(folder / _LOCK)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise FolderLocked(
            f"Another process is using the cache folder {folder}. "
            "Give this one its own with --cache-dir."
        ) from None
    except BaseException:
        os.close(handle)
        raise
    return handle


def _claim_new(folder: Path) -> int:
    os.close(make_folder(folder))
    handle = claim(folder)
    sync_path(folder.parent)
    return handle


def _touch(lock: int) -> None:
    """Mark the model as used now."""
    with suppress(OSError):  # it only looks older than it is
        os.utime(lock)


def _open_lock(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)


def model_folders(home: Path) -> list[Path]:
    """The model folders of this cache. Everything else is ignored."""
    return sorted(path for path in home.iterdir() if _is_ours(path))


def _is_ours(path: Path) -> bool:
    if not _MODEL.fullmatch(path.name) or path.is_symlink() or not path.is_dir():
        return False
    lock = path / _LOCK
    return lock.is_file() and not lock.is_symlink()


def _write_name(path: Path, name: str) -> None:
    """Write the model's name, by which other models of the server recognise its folder."""
    with suppress(OSError):  # the folder then counts as idle
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(name.encode(errors="surrogateescape"))


def _read_name(path: Path) -> str:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(handle, "rb") as file:
            return file.read(1 << 16).decode(errors="surrogateescape")
    except OSError:
        return ""


def _make_room(mine: Path, served: Sequence[str], limit_bytes: int) -> tuple[int, int]:
    """Trim other folders. Returns the limit of this folder, and the bytes in superseded ones.

    Idle models take at most half of the limit, and the served models share the rest. State of this
    model from another engine, KV type or secret takes at most half of its share.
    """
    named = {path: _read_name(path / _NAME) for path in model_folders(mine.parent) if path != mine}
    idle = [path for path, name in named.items() if not name or name not in served]
    superseded = [path for path, name in named.items() if name and name == served[0]]
    share = max(limit_bytes - _trim(idle, limit_bytes // 2), 0) // len(served)
    superseded_bytes = _trim(superseded, share // 2)
    return max(share - superseded_bytes, 0), superseded_bytes


def _trim(folders: Sequence[Path], max_bytes: int) -> int:
    """Remove unused folders, oldest first, down to `max_bytes`. Returns the bytes that remain."""
    with ExitStack() as claims:
        sizes: dict[Path, int] = {}
        for folder in folders:
            with suppress(FolderLocked):
                claims.callback(os.close, claim(folder))
                sizes[folder] = used_bytes(folder)
        for folder in sorted(sizes, key=lambda folder: (folder / _LOCK).stat().st_mtime_ns):
            if sum(sizes.values()) <= max_bytes:
                break
            if not _may_have_pins(folder / INDEX):
                _remove(folder)
                sizes[folder] = used_bytes(folder)
        return sum(sizes.values())


def used_bytes(folder: Path) -> int:
    return sum(
        (Path(above) / name).lstat().st_size
        for above, _, names in os.walk(folder)
        for name in names
    )


def _may_have_pins(index: Path) -> bool:
    """Whether removing this index might lose a pin. If its pins cannot be read, it might."""
    if not index.exists():
        return beside(index, BACKUP).exists()
    try:
        index_db = IndexDb(index)
    except (OSError, sqlite3.Error, IndexDamaged):
        return True
    try:
        return any(entry.pinned for entry in index_db.entries())
    except (sqlite3.Error, IndexDamaged):
        return True
    finally:
        index_db.close()


def _remove(folder: Path) -> None:
    """Remove the lock last, so that an interrupted removal can be finished later."""
    with suppress(OSError):
        for path in folder.iterdir():
            if stat.S_ISDIR(path.lstat().st_mode):
                shutil.rmtree(path)
            elif path.name != _LOCK:
                path.unlink()
        shutil.rmtree(folder)
