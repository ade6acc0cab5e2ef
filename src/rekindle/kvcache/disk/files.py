"""Wraps the system calls of the cache on the files of one folder."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rekindle.errors import CorruptBlock
from rekindle.memory import Buffer

FILE_MODE = 0o600
FOLDER_MODE = 0o700
_CALL_BYTES = 1 << 30  # macOS refuses more than 2 GiB in one call


@dataclass(frozen=True, slots=True)
class Calls:
    """The system calls that tests replace by failing ones."""

    open: Callable[..., int] = os.open
    preadv: Callable[..., int] = os.preadv
    writev: Callable[..., int] = os.writev
    fsync: Callable[[int], None] = os.fsync
    replace: Callable[..., None] = os.replace
    unlink: Callable[..., None] = os.unlink


SYSTEM = Calls()


def make_folder(path: Path) -> int:
    """Open a folder that only its owner can enter, and create it if needed. Follows no link."""
    with suppress(FileExistsError):
        path.mkdir(mode=FOLDER_MODE)
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if stat.S_IMODE(os.fstat(handle).st_mode) != FOLDER_MODE:
            os.fchmod(handle, FOLDER_MODE)
    except BaseException:
        os.close(handle)
        raise
    return handle


def sync_path(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@dataclass(frozen=True, slots=True)
class ReadFile:
    """An open file and its size."""

    _calls: Calls
    _handle: int
    size_bytes: int

    def check_size(self, size_bytes: int) -> None:
        if self.size_bytes != size_bytes:
            raise CorruptBlock(f"its file has {self.size_bytes} bytes instead of {size_bytes}")

    def read_into(self, buffers: Sequence[bytearray | memoryview], start: int) -> None:
        """Fill the buffers with the bytes from `start` on."""

        def read(views: Sequence[memoryview], moved_bytes: int) -> int:
            return self._calls.preadv(self._handle, views, start + moved_bytes)

        if _transfer(read, buffers) != sum(map(len, buffers)):
            raise CorruptBlock("its file was truncated while it was read")


class Files:
    """The files of one folder. Names are plain names, never paths, and links are not followed."""

    def __init__(self, path: Path, calls: Calls = SYSTEM) -> None:
        self._calls = calls
        self._folder = make_folder(path)

    def close(self) -> None:
        folder, self._folder = self._folder, -1  # the number may be reused for another file
        if folder >= 0:
            os.close(folder)

    def write(self, name: str, parts: Sequence[Buffer]) -> None:
        self.write_all([(name, parts)])

    def write_all(self, items: Sequence[tuple[str, Sequence[Buffer]]]) -> None:
        """Publish each file whole or not at all. On return all of them are on disk.

        Writing every file before the first fsync was measured and gained nothing.
        """
        waiting: deque[str] = deque()
        try:
            for name, parts in items:
                waiting.append(_plain(name))
                self._write_temporary(_temporary(name), parts)
            while waiting:
                self._replace(_temporary(waiting[0]), self._folder, waiting[0])
                waiting.popleft()
        except BaseException:
            for name in waiting:
                with suppress(OSError):  # raise the first error; `sweep` removes the rest later
                    self.unlink(_temporary(name))
            raise
        if items:
            self.sync()

    def _write_temporary(self, name: str, parts: Sequence[Buffer]) -> None:
        handle = self._create(name)
        try:
            moved_bytes = _transfer(lambda views, _: self._calls.writev(handle, views), parts)
            if moved_bytes != sum(map(len, parts)):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            # Before the rename: a crash may lose the file but never tear it. A failed fsync is not
            # repeated, because the kernel may have dropped the pages and would report success.
            self._calls.fsync(handle)
        finally:
            os.close(handle)

    def _create(self, name: str) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        try:
            return self._calls.open(name, flags, FILE_MODE, dir_fd=self._folder)
        except FileExistsError:  # left by a failed write, because a folder has one writer
            self.unlink(name)
            return self._calls.open(name, flags, FILE_MODE, dir_fd=self._folder)

    def _replace(self, name: str, folder: int, new: str) -> None:
        self._calls.replace(name, new, src_dir_fd=self._folder, dst_dir_fd=folder)

    def move(self, name: str, other: Files, new: str) -> None:
        """Move an item of any type to another folder."""
        self._replace(_plain(name), other._folder, _plain(new))

    def unlink(self, name: str) -> None:
        """Remove a file or a link, if it exists."""
        with suppress(FileNotFoundError):
            self._calls.unlink(_plain(name), dir_fd=self._folder)

    def discard(self, name: str) -> None:
        """Remove an item of any type; a folder with its content."""
        with suppress(FileNotFoundError):
            status = os.stat(_plain(name), dir_fd=self._folder, follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode):
                shutil.rmtree(name, dir_fd=self._folder)
            else:
                self.unlink(name)

    def sync(self) -> None:
        """Flush the names to disk."""
        self._calls.fsync(self._folder)

    def sweep(self) -> None:
        """Remove the temporary files of unfinished writes."""
        for name in self.sizes():
            if is_temporary(name):
                self.unlink(name)

    def read_into(self, name: str, buffers: Sequence[bytearray | memoryview], size: int) -> None:
        """Fill the buffers with a file of exactly `size` bytes."""
        if sum(map(len, buffers)) != size:
            raise ValueError("the buffers do not have the size of the file")
        with self.reading(name) as file:
            file.check_size(size)
            file.read_into(buffers, 0)

    def read_start(self, name: str, count: int) -> tuple[bytes, int]:
        """Up to `count` bytes from the start of a file, and its size."""
        with self.reading(name) as file:
            start = bytearray(min(count, file.size_bytes))
            file.read_into([start], 0)
            return bytes(start), file.size_bytes

    @contextmanager
    def reading(self, name: str) -> Iterator[ReadFile]:
        # O_NONBLOCK: a FIFO in place of a file would block forever.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        handle = self._calls.open(_plain(name), flags, dir_fd=self._folder)
        try:
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode):
                raise CorruptBlock("it is not a regular file")
            yield ReadFile(self._calls, handle, status.st_size)
        finally:
            os.close(handle)

    def scan(self) -> Iterator[tuple[str, bool]]:
        """All names in any order, and whether each is a regular file. Does not stat."""
        with os.scandir(self._folder) as entries:
            for entry in entries:
                yield entry.name, entry.is_file(follow_symlinks=False)

    def _regular_files(self) -> Iterator[tuple[str, os.stat_result]]:
        with os.scandir(self._folder) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # removed in the meantime
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode):
                        yield entry.name, status

    def sizes(self) -> dict[str, int]:
        """The regular files and their sizes."""
        return {name: status.st_size for name, status in self._regular_files()}

    def oldest_first(self) -> list[tuple[str, int]]:
        """The regular files and their sizes, in the order of their last write or touch."""
        found = sorted(
            (status.st_mtime_ns, n, status.st_size) for n, status in self._regular_files()
        )
        return [(name, size) for _, name, size in found]

    def touch(self, name: str) -> None:
        """Mark a file as used now."""
        with suppress(OSError):  # it only looks older than it is
            os.utime(_plain(name), dir_fd=self._folder, follow_symlinks=False)

    def names(self) -> list[str]:
        """All names, sorted."""
        return sorted(name for name, _ in self.scan())

    def free_bytes(self) -> int:
        """Free space of the file system for an unprivileged user."""
        system = os.fstatvfs(self._folder)
        return system.f_bavail * system.f_frsize


def is_temporary(name: str) -> bool:
    return name.startswith(".") and name.endswith(".tmp")


def _temporary(name: str) -> str:
    return f".{name}.tmp"


def _plain(name: str) -> str:
    """Refuse a path: it would leave the folder, and an absolute one ignores the folder's handle."""
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ValueError("a file's name is not a path")
    return name


def _transfer(call: Callable[[list[memoryview], int], int], buffers: Sequence[Buffer]) -> int:
    """Call until all bytes are moved or the file ends. Returns the bytes moved; each call is given
    the number moved so far."""
    views = deque(memoryview(buffer).cast("B") for buffer in buffers if len(buffer))
    moved_bytes = 0
    while views:
        count = call(_window(views), moved_bytes)
        if not count:
            break
        moved_bytes += count
        while count:
            view = views.popleft()
            if count < len(view):
                views.appendleft(view[count:])
            count -= min(count, len(view))
    return moved_bytes


def _window(views: Sequence[memoryview]) -> list[memoryview]:
    """The bytes that one call takes: POSIX guarantees 16 buffers."""
    window: list[memoryview] = []
    room = _CALL_BYTES
    for view in views:
        if not room or len(window) == 16:
            break
        window.append(view[:room])
        room -= len(window[-1])
    return window
