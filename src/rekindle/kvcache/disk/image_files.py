"""Stores encoded images as files that are sealed like blocks, within a byte budget.

The files have no index. The name is the image's key, and the file system knows the size and the
last use. One thread reads and writes them.
"""

from __future__ import annotations

import logging
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rekindle.errors import CorruptBlock
from rekindle.kvcache.block import KEY_BYTES
from rekindle.kvcache.codec import (
    HEADER_BYTES,
    MAC_BYTES,
    Record,
    parse_header,
    record_bytes,
    seal,
    verify,
)
from rekindle.kvcache.disk.files import Files
from rekindle.memory import Buffer
from rekindle.tokens import Tokens

log = logging.getLogger("rekindle.cache")

FOLDER = "pictures"
_NAME = re.compile(f"[0-9a-f]{{{2 * KEY_BYTES}}}")
_NAMESPACE = bytes(KEY_BYTES)  # of all records; no block has it, so an image never passes for one


@dataclass(frozen=True, slots=True)
class EncodedPicture:
    """Vectors as bytes, row by row."""

    rows: int
    width: int
    vectors: Buffer


@dataclass(frozen=True, slots=True)
class PictureRead:
    """The result of a read. `picture` is None if the file is missing or damaged."""

    key: bytes
    picture: EncodedPicture | None


class PictureFiles:
    """Any thread may call it. Files are read and written on a thread of its own."""

    MAX_QUEUE_BYTES = 64 << 20  # images are not stored while this much waits to be written

    def __init__(
        self,
        folder: Path,
        secret: bytes,
        on_read: Callable[[PictureRead], None],
        *,
        limit_bytes: int,
        floor_bytes: int = 0,
    ) -> None:
        """`floor_bytes` of the disk stay free."""
        self._floor_bytes = floor_bytes
        self._secret = secret
        self._on_read = on_read
        self._files = Files(folder / FOLDER)
        self._limit_bytes = limit_bytes
        self._used_bytes = 0
        self._sizes: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._lock = threading.Lock()  # for sizes and queue
        self._queued_bytes = 0
        self._found: set[bytes] = set()  # files of earlier processes
        self._is_listed = False
        self._worker = ThreadPoolExecutor(1, "picture-files")
        self._worker.submit(self._guarded, self._list)

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    def holds(self, key: bytes) -> bool:
        """Whether a read may find the image. Until the folder is listed, any image may exist."""
        return key in self._sizes or not self._is_listed

    def read(self, key: bytes) -> None:
        """Start reading an image. `on_read` is called with the result."""
        self._worker.submit(self._guarded, self._read, key)

    def write(self, key: bytes, picture: EncodedPicture) -> None:
        """Store an image, unless the queue is full."""
        size = len(picture.vectors)
        with self._lock:
            has_room = self._queued_bytes + size <= self.MAX_QUEUE_BYTES
            self._queued_bytes += size if has_room else 0
        if has_room:
            self._worker.submit(self._guarded, self._write, key, picture)

    def remove(self, key: bytes) -> None:
        """Remove an image after the queued writes."""
        self._worker.submit(self._guarded, self._remove_known, key)

    def retain(self, keys: Iterable[bytes]) -> None:
        """Remove all files of earlier processes except these. The keys are read on the thread of
        the files."""
        self._worker.submit(self._guarded, self._retain, keys)

    def close(self) -> None:
        """Finish queued writes. A disk that hangs is not waited for longer than 10 seconds."""
        last = self._worker.submit(self._files.close)
        self._worker.shutdown(wait=False)
        wait([last], 10.0)

    def _guarded(self, work: Callable[..., None], *about: object) -> None:
        try:
            work(*about)
        except Exception:  # a broken cache must not fail a turn
            log.exception("encoded images: %s failed", work.__name__)

    def _list(self) -> None:
        """List the files of earlier processes, within the current budget."""
        try:
            self._files.sweep()
            for name, size in self._files.oldest_first():
                if _NAME.fullmatch(name):
                    self._count(bytes.fromhex(name), size)
            self._found = set(self._sizes)
            self._make_room(0)
        finally:
            self._is_listed = True

    def _make_room(self, size: int) -> None:
        """Remove the least recently used files until another one of this size fits."""
        while self._sizes and self._used_bytes + size > self._limit_bytes:
            self._remove(next(iter(self._sizes)))

    def _retain(self, keys: Iterable[bytes]) -> None:
        for key in self._found.difference(keys):
            self._remove_known(key)

    def _remove_known(self, key: bytes) -> None:
        if key in self._sizes:
            self._remove(key)

    def _remove(self, key: bytes) -> None:
        """Remove a file. If that fails, the file still counts."""
        self._files.unlink(key.hex())
        self._uncount(key)

    def _count(self, key: bytes, size: int) -> None:
        with self._lock:
            self._sizes[key] = size
            self._used_bytes += size

    def _uncount(self, key: bytes) -> None:
        with self._lock:
            self._used_bytes -= self._sizes.pop(key, 0)

    def _write(self, key: bytes, picture: EncodedPicture) -> None:
        with self._lock:
            self._queued_bytes -= len(picture.vectors)
        shape = Tokens.of([picture.rows, picture.width])
        record = Record(_NAMESPACE, key, shape, picture.vectors, exact=False)
        parts = seal(record, self._secret)
        size = sum(map(len, parts))
        if size > self._limit_bytes or self._files.free_bytes() - size < self._floor_bytes:
            return
        if key in self._sizes:
            self._remove(key)
        self._make_room(size)
        self._count(key, size)  # before the write, so that the budget holds at any time
        try:
            self._files.write(key.hex(), parts)
            self._found.discard(key)
        except BaseException:
            self._remove(key)
            raise

    def _read(self, key: bytes) -> None:
        picture = None
        try:
            picture = self._verified(key)
            self._files.touch(key.hex())
            with self._lock:
                if key in self._sizes:
                    self._sizes.move_to_end(key)
        except FileNotFoundError:
            self._uncount(key)
        except CorruptBlock as error:
            log.warning("an encoded image is damaged and will be encoded again: %s", error)
            with suppress(OSError):
                self._remove(key)
        finally:
            self._on_read(PictureRead(key, picture))

    def _verified(self, key: bytes) -> EncodedPicture:
        start, size = self._files.read_start(key.hex(), HEADER_BYTES)
        header = parse_header(start)
        if header.record_bytes != size or record_bytes(header.packed_bytes, 0) > size:
            raise CorruptBlock("its length disagrees with its header")
        raw, mac = bytearray(HEADER_BYTES), bytearray(MAC_BYTES)
        packed = bytearray(header.packed_bytes)
        vectors = np.empty(header.blob_bytes, np.uint8).data
        self._files.read_into(key.hex(), (raw, packed, vectors, mac), size)
        record = verify(raw, packed, vectors, mac, self._secret)
        if record.parent != key or record.namespace != _NAMESPACE or len(record.tokens) != 2:
            raise CorruptBlock("it is another image than its name says")
        rows, width = record.tokens
        return EncodedPicture(rows, width, record.blob)
