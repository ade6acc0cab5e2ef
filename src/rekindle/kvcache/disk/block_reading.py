"""One block on its way from its file into memory: in stripes, by as many threads as take part.

Each thread reads a stripe into its place and hashes it while it is in that core's cache. One core
copies 6 GB/s out of the page cache and hashes 5; a GPU takes 40.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rekindle.buffers import Allocate
from rekindle.errors import CorruptBlock
from rekindle.kvcache.block import chain_key
from rekindle.kvcache.codec import (
    HEADER_BYTES,
    MAC_BYTES,
    Header,
    Record,
    parse_header,
    stripe_digest,
    stripes,
    verify,
)
from rekindle.kvcache.disk.files import Files, ReadFile

#: What says nothing about the file: this process has too much open, or too little memory.
_OUR_OWN_FAULT = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR}


class BlockReading:
    """Any thread may take part; one that comes late finds nothing to do. The block is there when
    the last has left; what was read is believed when all of it is verified."""

    def __init__(
        self, files: Files, key: bytes, size_bytes: int, secret: bytes, allocate: Allocate
    ) -> None:
        self._files = files
        self._key = key
        self._size_bytes = size_bytes
        self._secret = secret
        self._allocate = allocate
        self._lock = threading.Lock()
        self._threads = 0  # that take part now
        self._is_over = False
        self._error: Exception | None = None  # the first
        self._header: Header | None = None
        self._raw, self._mac = bytearray(HEADER_BYTES), bytearray(MAC_BYTES)
        self._packed = bytearray()
        self._blob = memoryview(b"")
        self._stripes = 0
        self._rest: Iterator[tuple[int, memoryview]] = iter(())  # that nobody has begun
        self._digests: dict[int, bytes] = {}  # of those that are read, by where they begin

    def take_part(self, is_wanted: Callable[[], bool] = lambda: True) -> bool:
        """Read stripes until none is left, or none is wanted any more; True: this was the last
        thread to leave, and the block is to be had."""
        with self._lock:
            if self._is_over:
                return False
            self._threads += 1
        try:
            if self._error is None and is_wanted():
                self._read(is_wanted)
        except Exception as error:
            self._error = self._error or error
        with self._lock:
            self._threads -= 1
            self._is_over = not self._threads
            return self._is_over

    def _read(self, is_wanted: Callable[[], bool]) -> None:
        with blamed_on_the_file(), self._files.reading(self._key.hex()) as file:
            file.check_size(self._size_bytes)
            with self._lock:
                header = self._header = self._header or self._begin(file)
            state_at = HEADER_BYTES + header.packed_bytes
            for start, stripe in self._rest:  # shared: each is given out once
                if self._error is not None or not is_wanted():
                    return
                file.read_into([stripe], state_at + start)
                digest = stripe_digest(stripe, self._secret) if header.is_striped else b""
                self._digests[start] = digest

    def _begin(self, file: ReadFile) -> Header:
        """Read all but the state, and have memory for that."""
        file.read_into([self._raw], 0)
        header = parse_header(self._raw)
        if header.record_bytes != self._size_bytes:
            raise CorruptBlock("its length disagrees with its header")
        self._packed = bytearray(header.packed_bytes)
        file.read_into([self._packed], HEADER_BYTES)
        file.read_into([self._mac], self._size_bytes - MAC_BYTES)
        self._blob = self._allocate(header.blob_bytes)
        found = stripes(self._blob)
        self._stripes, self._rest = len(found), iter(found)
        return header

    def record(self) -> Record | None:
        """The block as it was written, or CorruptBlock with the reason; None: it was not wanted any
        more. Once, when it is over: what was read is let go of. An OSError means that this process
        lacks handles or memory: the file may be fine."""
        blob, error = self._blob, self._error
        self._blob, self._rest, self._error = memoryview(b""), iter(()), None
        if error is not None:
            try:
                raise error
            finally:
                del error  # or its traceback and this frame would keep the memory alive
        if self._header is None or len(self._digests) < self._stripes:
            return None
        digests = [digest for _, digest in sorted(self._digests.items())]
        record = verify(self._raw, self._packed, blob, self._mac, self._secret, digests)
        if chain_key(record.parent, record.tokens) != self._key:
            raise CorruptBlock("it is another block than its name says")
        return record


@contextmanager
def blamed_on_the_file() -> Iterator[None]:
    """To whoever wants the block, a file that cannot be read is as bad as a wrong one."""
    try:
        yield
    except FileNotFoundError:
        raise CorruptBlock("its file is missing") from None
    except OSError as error:
        if error.errno in _OUR_OWN_FAULT:
            raise
        raise CorruptBlock(f"its file cannot be read: {error.strerror}") from error
