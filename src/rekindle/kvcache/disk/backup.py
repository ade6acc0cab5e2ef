"""Copies a cache folder while a server uses it, for `rekindle cache backup`.

Block files never change once they have their name, so they can be copied at any time. The index
changes with every turn, so its copy is made between two changes and then checked. It is copied
first: blocks that are written later are found by their files when the copy is opened, and rows of
blocks that were evicted in the meantime are dropped. Nothing in the copy is trusted more than in
the original: each block is verified before it is used.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from rekindle.errors import RekindleError
from rekindle.kvcache.disk.folder import INDEX, model_folders
from rekindle.kvcache.disk.index_db import BACKUP, SIDECARS, beside

TRIES = 50
PAUSE_S = 0.05
#: A change within this time of the last one may leave the file's time as it was.
SETTLED_NS = 20_000_000
LOCK = "lock"  # tells the folder of a model from others; its content has no meaning


@dataclass(frozen=True, slots=True)
class BackupReport:
    folders: int
    files: int
    size_bytes: int
    torn: tuple[str, ...]  # folders whose index changed all the time: their names are from earlier


def back_up(
    cache_dir: Path, target: Path, sleep: Callable[[float], None] = time.sleep
) -> BackupReport:
    """Copy the folder. The target must not exist, or be empty. Raises RekindleError."""
    if not cache_dir.is_dir():
        raise RekindleError(f"there is no cache folder {cache_dir}")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise RekindleError(f"{target} is not empty: name a folder that does not exist yet")
    if target.resolve().is_relative_to(cache_dir.resolve()):
        raise RekindleError(f"{target} is inside of the cache folder: choose another place")
    _make(target)
    home, torn = cache_dir.resolve(), []
    copied = _Copied()
    copied.file(home / "secret", target / "secret")
    folders = model_folders(home)
    for folder in folders:
        place = target / folder.name
        _make(place)
        if not _copy_index(folder, place, copied, sleep):
            torn.append(folder.name)
        for path in _others(folder):
            _make((place / path.relative_to(folder)).parent)
            copied.file(path, place / path.relative_to(folder))
        (place / LOCK).touch(mode=0o600)
    (target / LOCK).touch(mode=0o600)
    return BackupReport(len(folders), copied.files, copied.size_bytes, tuple(torn))


def _make(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


class _Copied:
    """Copies files, and counts them."""

    def __init__(self) -> None:
        self.files = 0
        self.size_bytes = 0

    def file(self, source: Path, target: Path) -> None:
        """Copy a file for its owner only. A file that has just been removed is left out."""
        with suppress(FileNotFoundError):
            with source.open("rb") as read:
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
                with os.fdopen(os.open(target, flags, 0o600), "wb") as written:
                    shutil.copyfileobj(read, written, 1 << 20)
            self.files += 1
            self.size_bytes += target.stat().st_size


def _others(folder: Path) -> Iterator[Path]:
    """All files but those of the index and the locks. Quarantined ones stay behind."""
    index = {INDEX, LOCK, *(f"{INDEX}{suffix}" for suffix in (*SIDECARS, BACKUP))}
    for above, names, files in os.walk(folder):
        if Path(above) == folder:
            names[:] = [name for name in names if name != "aside"]
            files = [name for name in files if name not in index]
        yield from (Path(above) / name for name in files)


def _copy_index(
    folder: Path, target: Path, copied: _Copied, sleep: Callable[[float], None]
) -> bool:
    """Copy the index between two changes. Returns False if there was no such moment, and leaves the
    backup that the server makes every ten minutes."""
    files = [INDEX, *(f"{INDEX}{suffix}" for suffix in SIDECARS)]
    for _ in range(TRIES):
        before = _state(folder, files)
        newest_ns = max((modified for modified, _ in before.values()), default=0)
        if time.time_ns() - newest_ns > SETTLED_NS:
            attempt = _Copied()
            for name in files:
                (target / name).unlink(missing_ok=True)
                attempt.file(folder / name, target / name)
            if _state(folder, files) == before and _is_whole(target / INDEX):
                copied.files += attempt.files
                copied.size_bytes += attempt.size_bytes
                return True
        sleep(PAUSE_S)
    for name in files:
        (target / name).unlink(missing_ok=True)
    copied.file(beside(folder / INDEX, BACKUP), target / INDEX)
    return False


def _state(folder: Path, files: list[str]) -> dict[str, tuple[int, int]]:
    found = {}
    for name in files:
        with suppress(FileNotFoundError):
            stat = (folder / name).stat()
            found[name] = (stat.st_mtime_ns, stat.st_size)
    return found


def _is_whole(index: Path) -> bool:
    """Whether SQLite finds the copy consistent. This also moves the log into it."""
    if not index.exists():
        return True  # the server has not written one yet
    try:
        with closing(sqlite3.connect(index)) as db:
            found = db.execute("PRAGMA quick_check(1)").fetchall()
    except sqlite3.Error:
        return False
    return found == [("ok",)]
