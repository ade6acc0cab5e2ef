"""Encoded pictures as files: sealed like blocks, verified when they are read, within a budget.

They lie beside the blocks of the same model and have no index: a file's name says whose picture it
is, its size and its last use are the file system's. One thread reads and writes them.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable
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
    Buffer,
    Record,
    parse_header,
    record_bytes,
    seal,
    verify,
)
from rekindle.kvcache.disk.files import Files
from rekindle.tokens import Tokens

log = logging.getLogger("rekindle.cache")

FOLDER = "pictures"
MOST_QUEUE_BYTES = 64 << 20  # that wait to be written; more are not kept
LAST_WRITES_S = 10.0  # for what is queued when the files are closed
_NAME = re.compile(f"[0-9a-f]{{{2 * KEY_BYTES}}}")
_OWNER = bytes(KEY_BYTES)  # of all records: no block has this namespace, so none is taken for one


@dataclass(frozen=True, slots=True)
class EncodedPicture:
    """Vectors as bytes, row by row."""

    rows: int
    width: int
    vectors: Buffer


@dataclass(frozen=True, slots=True)
class PictureRead:
    """What a read brought; None: the file is gone or bad."""

    key: bytes
    picture: EncodedPicture | None


class PictureFiles:
    """Any thread may ask; what it asks for is done on one of its own."""

    def __init__(
        self,
        folder: Path,
        secret: bytes,
        on_read: Callable[[PictureRead], None],
        *,
        limit_bytes: int,
        floor_bytes: int = 0,
    ) -> None:
        """`floor_bytes` of the disk are left free."""
        self.limit_bytes = limit_bytes
        self._floor_bytes = floor_bytes
        self._secret = secret
        self._on_read = on_read
        self._files = Files(folder / FOLDER)
        self._sizes: dict[bytes, int] = {}  # least recently used first
        self._lock = threading.Lock()  # for sizes and queue
        self._queued_bytes = 0
        self._is_listed = False
        self._worker = ThreadPoolExecutor(1, "picture-files")
        self._worker.submit(self._guarded, self._list)

    @property
    def used_bytes(self) -> int:
        with self._lock:
            return sum(self._sizes.values())

    def holds(self, key: bytes) -> bool:
        """Whether a read may bring it: until the folder is listed, any may be there."""
        return key in self._sizes or not self._is_listed

    def read(self, key: bytes) -> None:
        """Have a picture read; `on_read` is called with it."""
        self._worker.submit(self._guarded, self._read, key)

    def write(self, key: bytes, picture: EncodedPicture) -> None:
        """Keep a picture, unless too much is waiting to be written already."""
        size = len(picture.vectors)
        with self._lock:
            is_kept = self._queued_bytes + size <= MOST_QUEUE_BYTES
            self._queued_bytes += size if is_kept else 0
        if is_kept:
            self._worker.submit(self._guarded, self._write, key, picture)

    def close(self) -> None:
        """Write what is queued; a disk that hangs is not waited for."""
        last = self._worker.submit(self._files.close)
        self._worker.shutdown(wait=False)
        wait([last], LAST_WRITES_S)

    # -- the thread ----------------------------------------------------------------------------

    def _guarded(self, work: Callable[..., None], *about: object) -> None:
        try:
            work(*about)
        except Exception:  # a cache that cannot be used is no reason to fail a turn
            log.exception("encoded pictures: %s failed", work.__name__)

    def _list(self) -> None:
        """What an earlier process has left, within the budget of this one."""
        try:
            self._files.sweep()
            found = self._files.oldest_first()
            with self._lock:
                self._sizes = {bytes.fromhex(n): size for n, size in found if _NAME.fullmatch(n)}
            self._make_room(0)
        finally:
            self._is_listed = True

    def _make_room(self, size_bytes: int) -> None:
        while self._sizes and self.used_bytes + size_bytes > self.limit_bytes:
            self._remove(next(iter(self._sizes)))

    def _remove(self, key: bytes) -> None:
        self._files.unlink(key.hex())
        with self._lock:
            self._sizes.pop(key, None)

    def _write(self, key: bytes, picture: EncodedPicture) -> None:
        with self._lock:
            self._queued_bytes -= len(picture.vectors)
        shape = Tokens.of([picture.rows, picture.width])
        parts = seal(Record(_OWNER, key, shape, picture.vectors, exact=False), self._secret)
        size = sum(map(len, parts))
        if size > self.limit_bytes or self._files.free_bytes() - size < self._floor_bytes:
            return
        self._remove(key)
        self._make_room(size)
        self._files.write(key.hex(), parts)
        with self._lock:
            self._sizes[key] = size

    def _read(self, key: bytes) -> None:
        picture = None
        try:
            picture = self._verified(key)
            self._files.touch(key.hex())
            with self._lock:  # the most recently used one is the last
                self._sizes[key] = self._sizes.pop(key)
        except FileNotFoundError:
            self._remove(key)
        except CorruptBlock as error:
            log.warning("an encoded picture is damaged and encoded again: %s", error)
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
        if record.parent != key or record.namespace != _OWNER or len(record.tokens) != 2:
            raise CorruptBlock("it is another picture than its name says")
        rows, width = record.tokens
        return EncodedPicture(rows, width, record.blob)
