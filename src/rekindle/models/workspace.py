"""Gives each pull a hidden folder to work in, and publishes finished files atomically."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path

from filelock import FileLock, Timeout
from rich.filesize import decimal

from rekindle.errors import ModelError
from rekindle.models.progress import Progress, task


@contextmanager
def workspace(final: Path, models_dir: Path, progress: Progress) -> Iterator[Path]:
    """Yield a folder for the pull of `final` that no other process uses.

    A failed pull leaves its folder, so that the same pull can resume. Any other pull removes it. A
    second process that wants the same file waits instead of fetching it twice.
    """
    pulls = models_dir / ".pulls"
    pulls.mkdir(parents=True, exist_ok=True)
    folder = pulls / _key(final.relative_to(models_dir))
    lock = _lock(folder)
    _acquire(lock, final, progress)
    try:
        _sweep(pulls, keep=folder)
        folder.mkdir(exist_ok=True)
        yield folder
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        lock.release()


def require_room(folder: Path, size_bytes: int) -> None:
    free_bytes = shutil.disk_usage(folder).free
    if size_bytes > free_bytes:
        raise ModelError(
            f"The model needs {decimal(size_bytes)} and the disk under {folder} has "
            f"{decimal(free_bytes)} free. Free some space or set REKINDLE_MODELS_DIR."
        )


def publish(part: Path, final: Path) -> None:
    """Make the file visible whole, or not at all."""
    final.parent.mkdir(parents=True, exist_ok=True)
    with part.open("rb+") as file:
        os.fsync(file.fileno())  # before the rename: a crash may lose the file, never tear it
    part.replace(final)


def publish_folder(folder: Path, final: Path) -> None:
    """Make a folder of published files visible whole, or not at all."""
    final.parent.mkdir(parents=True, exist_ok=True)
    try:
        folder.replace(final)
    except OSError as error:
        raise ModelError(
            f"{final} already has other content ({error.strerror}). Move it away and pull again."
        ) from error


def _key(relative: Path) -> str:
    return f"{relative.stem[:80]}-{sha256(relative.as_posix().encode()).hexdigest()[:12]}"


def _lock(folder: Path) -> FileLock:
    # Next to the folder and never deleted: a deleted lock file would lock nobody out.
    return FileLock(folder.with_name(f"{folder.name}.lock"))


def _acquire(lock: FileLock, final: Path, progress: Progress) -> None:
    with suppress(Timeout):
        lock.acquire(timeout=0)
        return
    with task(progress, None, f"Waiting for another process that is pulling {final.name}"):
        lock.acquire()


def _sweep(pulls: Path, *, keep: Path) -> None:
    for folder in pulls.iterdir():
        if folder == keep or not folder.is_dir():
            continue
        with suppress(Timeout), _lock(folder).acquire(timeout=0):  # skip folders in use
            shutil.rmtree(folder, ignore_errors=True)
