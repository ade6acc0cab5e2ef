"""Blocks as files: each named by its chain key, each verified when it is read."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

from rekindle.errors import CorruptBlock
from rekindle.kvcache.block import KEY_BYTES, chain_key
from rekindle.kvcache.codec import (
    HEADER_BYTES,
    MAC_BYTES,
    Header,
    Record,
    parse_header,
    seal,
    stripe_digest,
    stripes,
    verify,
)
from rekindle.kvcache.disk.files import Files, ReadFile, is_temporary
from rekindle.memory import Allocate, plain_memory
from rekindle.tokens import Tokens

# ----------------------------------------------------------------------
# One block on its way from its file into memory: in stripes, by as many threads as take part.
#
# Each thread reads a stripe into its place and hashes it while it is in that core's cache. One
# core copies 6 GB/s out of the page cache and hashes 5; a GPU takes 40.

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


MOST_QUARANTINE = 16  # bad files kept for a look at them
MOST_QUARANTINE_BYTES = 64 << 20  # unless the tier grants them less


class BlockFiles:
    """The block files of one model. Any thread may read; one at a time may change things."""

    def __init__(self, files: Files, secret: bytes, quarantine: Files) -> None:
        self.most_quarantine_bytes = MOST_QUARANTINE_BYTES
        self._files = files
        self._secret = secret
        self._quarantined = quarantine

    def write(self, records: Iterable[Record]) -> None:
        """Keep these blocks; on return they are on disk."""
        items = {
            _name(chain_key(record.parent, record.tokens)): seal(record, self._secret)
            for record in records
        }
        self._files.write_all(list(items.items()))

    def read(self, key: bytes, size_bytes: int, allocate: Allocate = plain_memory) -> Record:
        """The block as it was written, or CorruptBlock with the reason.

        An OSError means that this process lacks handles or memory: the file may be fine.
        """
        reading = self.reading(key, size_bytes, allocate)
        reading.take_part()
        record = reading.record()
        assert record is not None, "it was wanted all the time"
        return record

    def reading(
        self, key: bytes, size_bytes: int, allocate: Allocate = plain_memory
    ) -> BlockReading:
        """The same, for several threads to take part in."""
        return BlockReading(self._files, _checked(key), size_bytes, self._secret, allocate)

    def _header(self, key: bytes, size_bytes: int) -> Header:
        """The header of a file whose size is the one expected and the one it claims."""
        raw, found_bytes = self._files.read_start(_name(key), HEADER_BYTES)
        if found_bytes != size_bytes:
            raise CorruptBlock(f"its file has {found_bytes} bytes instead of {size_bytes}")
        header = parse_header(raw)
        if header.record_bytes != size_bytes:
            raise CorruptBlock("its length disagrees with its header")
        return header

    def tentative(self, key: bytes) -> tuple[Header, Tokens, int]:
        """Header, tokens and size of a file that looks like the block its name says.

        Good enough to rebuild an index, which is believed no further: `read` verifies the rest.
        """
        with blamed_on_the_file():
            _, size_bytes = self._files.read_start(_name(key), 0)
            header = self._header(key, size_bytes)
            raw, _ = self._files.read_start(_name(key), HEADER_BYTES + header.packed_bytes)
        tokens = Tokens(raw[HEADER_BYTES:])
        is_whole = len(tokens.packed) == header.packed_bytes
        if not is_whole or chain_key(header.parent, tokens) != key:
            raise CorruptBlock("it is another block than its name says")
        return header, tokens, size_bytes

    def quarantine(self, key: bytes) -> None:
        """Take a bad file out of use; the latest few are kept."""
        self._quarantine(_name(key))

    def tidy(self) -> tuple[set[bytes], int]:
        """The keys that files are named by, when what unfinished writes have left is removed, and
        folders, links and pipes with a block's name are out of its way; how many those were. One
        walk over all names, and no look at a file: there may be millions."""
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
        """Take everything that is not ours out of the folder."""
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
            if age >= MOST_QUARANTINE or kept_bytes > self.most_quarantine_bytes:
                with suppress(OSError):  # one more than intended; the next time may do better
                    self._quarantined.discard(name)

    def remove(self, keys: Sequence[bytes]) -> None:
        """Remove these blocks' files, for good; one that cannot be removed does not keep the
        others."""
        failed: OSError | None = None
        for key in keys:
            try:
                self._files.unlink(_name(key))
            except OSError as error:
                failed = failed or error
        if failed is not None:
            raise failed
        if keys:
            self._files.sync()  # or a crash of the machine might bring them back

    def sizes(self) -> dict[bytes, int]:
        """The files that have a block's name."""
        found = self._files.sizes().items()
        return {key: size for name, size in found if (key := _key(name))}

    def foreign(self) -> list[str]:
        """Names of what is neither a block's file nor an unfinished one."""
        files = self._files.sizes()
        return [
            name
            for name in self._files.names()
            if name not in files or not (_key(name) or is_temporary(name))
        ]

    def unfinished(self) -> list[str]:
        """Names of what `sweep` would remove."""
        return [name for name in self._files.sizes() if is_temporary(name)]

    def sweep(self) -> None:
        """Remove what unfinished writes have left."""
        self._files.sweep()

    def free_bytes(self) -> int:
        return self._files.free_bytes()


def _key(name: str) -> bytes | None:
    """The key that a block's file is named by; None: it is no such name."""
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
