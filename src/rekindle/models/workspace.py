"""The hidden folder a pull works in, and the step that puts a finished file in place."""

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

PULLS = ".pulls"


@contextmanager
def workspace(final: Path, models_dir: Path, progress: Progress) -> Iterator[Path]:
    """A folder for the pull of `final` that no other process uses meanwhile.

    A pull that failed leaves its folder, so that the same pull can go on from it; any other pull
    sweeps it. A second process that wants the same file waits rather than fetch it twice.
    """
    pulls = models_dir / PULLS
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
    """Raise ModelError when the disk cannot hold this many more bytes."""
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
            f"{final} holds something else already ({error.strerror}). Move it away and pull again."
        ) from error


def _key(relative: Path) -> str:
    return f"{relative.stem[:80]}-{sha256(relative.as_posix().encode()).hexdigest()[:12]}"


def _lock(folder: Path) -> FileLock:
    # Beside the folder and never deleted: a lock file that comes and goes locks nobody out.
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
        with suppress(Timeout), _lock(folder).acquire(timeout=0):  # held: somebody is at work there
            shutil.rmtree(folder, ignore_errors=True)
