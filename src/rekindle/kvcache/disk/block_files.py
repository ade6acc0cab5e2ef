"""Stores blocks as files that are named by their chain key and verified when they are read."""

from __future__ import annotations

import errno
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

from rekindle.errors import CorruptBlock
from rekindle.kvcache.block import KEY_BYTES, chain_key
from rekindle.kvcache.codec import (
    HEADER_BYTES,
    MAC_BYTES,
    Record,
    RecordHeader,
    parse_header,
    seal,
    stripe_digest,
    stripes,
    verify,
)
from rekindle.kvcache.disk.files import Files, ReadFile, is_temporary
from rekindle.memory import Allocate, plain_memory
from rekindle.tokens import Tokens

#: Errors of this process, which say nothing about the file.
_PROCESS_ERRORS = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR}


class BlockReading:
    """Reads one block in stripes with several threads.

    Each thread hashes a stripe while it is in that core's cache. One core copies 6 GB/s from the
    page cache and hashes 5 GB/s; a GPU takes 40 GB/s. The block is complete when the last thread
    leaves.
    """

    def __init__(
        self, files: Files, key: bytes, size_bytes: int, secret: bytes, allocate: Allocate
    ) -> None:
        self._files = files
        self._key = key
        self._size_bytes = size_bytes
        self._secret = secret
        self._allocate = allocate
        self._lock = threading.Lock()
        self._threads = 0  # taking part now
        self._is_over = False
        self._error: Exception | None = None  # the first
        self._header: RecordHeader | None = None
        self._raw, self._mac = bytearray(HEADER_BYTES), bytearray(MAC_BYTES)
        self._packed = bytearray()
        self._blob = memoryview(b"")
        self._stripes = 0
        self._rest: Iterator[tuple[int, memoryview]] = iter(())  # not started
        self._digests: dict[int, bytes] = {}  # of the stripes that were read, by offset

    def take_part(self, is_wanted: Callable[[], bool] = lambda: True) -> bool:
        """Read stripes until none is left or wanted. Returns True for the last thread to leave,
        which then calls `record`."""
        with self._lock:
            if self._is_over:
                return False
            self._threads += 1
        try:
            if self._error is None and is_wanted():
                self._read(is_wanted)
        except Exception as error:
            _clear_frames(error)
            self._error = self._error or error
        with self._lock:
            self._threads -= 1
            self._is_over = not self._threads
            return self._is_over

    def _read(self, is_wanted: Callable[[], bool]) -> None:
        with _raising_corrupt_block(), self._files.reading(self._key.hex()) as file:
            file.check_size(self._size_bytes)
            with self._lock:
                header = self._header = self._header or self._begin(file)
            state_at = HEADER_BYTES + header.packed_bytes
            for start, stripe in self._rest:  # the iterator is shared, so each stripe is read once
                if self._error is not None or not is_wanted():
                    return
                file.read_into([stripe], state_at + start)
                digest = stripe_digest(stripe, self._secret) if header.is_striped else b""
                self._digests[start] = digest

    def _begin(self, file: ReadFile) -> RecordHeader:
        """Read everything but the state, and allocate memory for the state."""
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
        """Return the verified block, or None if reading was abandoned. Call it once, at the end.

        Raises CorruptBlock with the reason. An OSError means that this process lacks handles or
        memory, and says nothing about the file.
        """
        self._rest = iter(())
        if self._error is not None:
            self._blob = memoryview(b"")
            raise self._error
        blob, self._blob = self._blob, memoryview(b"")
        if self._header is None or len(self._digests) < self._stripes:
            return None
        digests = [digest for _, digest in sorted(self._digests.items())]
        record = verify(self._raw, self._packed, blob, self._mac, self._secret, digests)
        if chain_key(record.parent, record.tokens) != self._key:
            raise CorruptBlock("it is another block than its name says")
        return record


def _clear_frames(error: BaseException) -> None:
    """Clear the variables of all frames that an error came through. They refer to the memory of
    the block, which would live as long as somebody holds the error."""
    cause: BaseException | None = error
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__cause__ or cause.__context__


@contextmanager
def _raising_corrupt_block() -> Iterator[None]:
    """Treat a file that cannot be read like a corrupt one."""
    try:
        yield
    except FileNotFoundError:
        raise CorruptBlock("its file is missing") from None
    except OSError as error:
        if error.errno in _PROCESS_ERRORS:
            raise
        raise CorruptBlock(f"its file cannot be read: {error.strerror}") from error


MAX_QUARANTINED = 16  # bad files that are kept for inspection


class BlockFiles:
    """The block files of one model. Any thread may read, and one at a time may write."""

    def __init__(
        self, files: Files, secret: bytes, quarantine: Files, max_quarantine_bytes: int = 64 << 20
    ) -> None:
        self.max_quarantine_bytes = max_quarantine_bytes
        self._files = files
        self._secret = secret
        self._quarantined = quarantine

    def write(self, records: Iterable[Record]) -> None:
        """Write these blocks. On return they are on disk."""
        items = {
            _name(chain_key(record.parent, record.tokens)): seal(record, self._secret)
            for record in records
        }
        self._files.write_all(list(items.items()))

    def read(self, key: bytes, size_bytes: int, allocate: Allocate = plain_memory) -> Record:
        """Read and verify a block on this thread. Raises as `BlockReading.record` does."""
        reading = self.reading(key, size_bytes, allocate)
        reading.take_part()
        record = reading.record()
        assert record is not None, "it was not abandoned"
        return record

    def reading(
        self, key: bytes, size_bytes: int, allocate: Allocate = plain_memory
    ) -> BlockReading:
        """Read a block with several threads."""
        return BlockReading(self._files, _checked(key), size_bytes, self._secret, allocate)

    def tentative(self, key: bytes) -> tuple[RecordHeader, Tokens, int]:
        """Header, tokens and size of a file that seems to be the block of its name.

        This is enough to rebuild an index. `read` verifies the rest.
        """
        with _raising_corrupt_block():
            start, size_bytes = self._files.read_start(_name(key), HEADER_BYTES)
            header = parse_header(start)
            if header.record_bytes != size_bytes:
                raise CorruptBlock("its length disagrees with its header")
            raw, _ = self._files.read_start(_name(key), HEADER_BYTES + header.packed_bytes)
        tokens = Tokens(raw[HEADER_BYTES:])
        is_whole = len(tokens.packed) == header.packed_bytes
        if not is_whole or chain_key(header.parent, tokens) != key:
            raise CorruptBlock("it is another block than its name says")
        return header, tokens, size_bytes

    def quarantine(self, key: bytes) -> None:
        """Move a bad file to the quarantine, which keeps the latest few."""
        self._quarantine(_name(key))

    def tidy(self) -> tuple[set[bytes], int]:
        """Remove unfinished writes, and quarantine folders, links and pipes that have a block's
        name. Returns the keys of all block files and the number quarantined. Walks all names once
        and opens no file, because there may be millions."""
        keys: set[bytes] = set()
        others: list[tuple[str, bool]] = []
        for name, is_regular in self._files.scan():
            if is_regular and (key := _key(name)):
                keys.add(key)
            else:
                others.append((name, is_regular))
        impostors = [name for name, _ in others if _key(name)]
        for name in impostors:
            self._quarantine(name)
        for name, is_regular in others:
            if is_regular and is_temporary(name):
                self._files.unlink(name)
        return keys, len(impostors)

    def quarantine_foreign(self) -> None:
        """Quarantine everything that is not a block file."""
        for name in self.foreign():
            self._quarantine(name)

    def _quarantine(self, name: str) -> None:
        stamp = f"{time.time_ns():020d}"  # sorts by age
        try:
            self._files.move(name, self._quarantined, f"{stamp}-{name[-2 * KEY_BYTES :]}")
        except FileNotFoundError:
            return
        except OSError:
            self._files.discard(name)
        else:
            self._trim()

    def _trim(self) -> None:
        sizes = self._quarantined.sizes()
        kept_bytes = 0
        for age, name in enumerate(reversed(self._quarantined.names())):
            kept_bytes += sizes.get(name, 0)
            if age >= MAX_QUARANTINED or kept_bytes > self.max_quarantine_bytes:
                with suppress(OSError):  # tried again next time
                    self._quarantined.discard(name)

    def remove(self, keys: Sequence[bytes]) -> None:
        """Remove the files of these blocks. If one cannot be removed, the others still are."""
        failed: OSError | None = None
        for key in keys:
            try:
                self._files.unlink(_name(key))
            except OSError as error:
                failed = failed or error
        if failed is not None:
            raise failed
        if keys:
            self._files.sync()  # otherwise a crash could bring them back

    def sizes(self) -> dict[bytes, int]:
        """The sizes of all block files."""
        found = self._files.sizes().items()
        return {key: size for name, size in found if (key := _key(name))}

    def foreign(self) -> list[str]:
        """Names of items that are neither block files nor unfinished writes."""
        files = self._files.sizes()
        return [
            name
            for name in self._files.names()
            if name not in files or not (_key(name) or is_temporary(name))
        ]

    def unfinished(self) -> list[str]:
        """Names of unfinished writes."""
        return [name for name in self._files.sizes() if is_temporary(name)]

    def sweep(self) -> None:
        """Remove unfinished writes."""
        self._files.sweep()

    def free_bytes(self) -> int:
        return self._files.free_bytes()


def _key(name: str) -> bytes | None:
    """The key in the name of a block file, or None for another name."""
    try:
        key = bytes.fromhex(name)
    except ValueError:
        return None
    return key if len(key) == KEY_BYTES and key.hex() == name else None


def _name(key: bytes) -> str:
    return _checked(key).hex()


def _checked(key: bytes) -> bytes:
    if len(key) != KEY_BYTES:
        raise ValueError("not a block's key")
    return key
