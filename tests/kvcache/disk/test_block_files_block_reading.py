"""Tests that several threads read a large block exactly or report an error."""

from __future__ import annotations

import errno
import gc
import os
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rekindle.errors import CorruptBlock
from rekindle.kvcache import codec
from rekindle.kvcache.codec import HEADER_BYTES, MAC_BYTES, Record, parse_header, seal
from rekindle.kvcache.disk.block_files import BlockFiles, BlockReading
from rekindle.kvcache.disk.files import SYSTEM, Calls, Files
from rekindle.memory import plain_memory
from tests.kvcache.records import SECRET, chain, flip, key_of, size_of

THREADS = 4
STRIPE_BYTES = 256
STRIPES = 20
PATIENCE_S = 30.0
[RECORD] = chain(1, blob_bytes=STRIPES * STRIPE_BYTES - 7)
KEY, SIZE = key_of(RECORD), size_of(RECORD)
STATE_AT = HEADER_BYTES + len(RECORD.tokens.packed)

Open = Callable[[Calls], BlockFiles]


@pytest.fixture(autouse=True)
def small_stripes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "STRIPE_BYTES", STRIPE_BYTES)
    monkeypatch.setattr(codec, "MIN_STRIPED_BYTES", 2 * STRIPE_BYTES)


@pytest.fixture
def open_files(tmp_path: Path) -> Iterator[Open]:
    opened: list[Files] = []

    def open_(calls: Calls = SYSTEM) -> BlockFiles:
        opened.extend(Files(tmp_path / name, calls) for name in ("blocks", "aside"))
        return BlockFiles(opened[-2], SECRET, opened[-1])

    yield open_
    for files in opened:
        files.close()


@pytest.fixture
def block_files(open_files: Open) -> BlockFiles:
    made = open_files(SYSTEM)
    made.write([RECORD])
    return made


@pytest.fixture
def path(block_files: BlockFiles, tmp_path: Path) -> Path:
    return tmp_path / "blocks" / KEY.hex()


def read_together(
    reading: BlockReading, is_wanted: Callable[[], bool] = lambda: True
) -> Record | None:
    """Read with several threads that start together and one that starts late."""
    begin = threading.Barrier(THREADS)

    def take_part() -> bool:
        begin.wait(PATIENCE_S)
        return reading.take_part(is_wanted)

    with ThreadPoolExecutor(THREADS) as threads:
        parts = [threads.submit(take_part) for _ in range(THREADS)]
    assert [part.result() for part in parts].count(True) == 1, "one of them was the last"
    assert not reading.take_part(is_wanted)
    return reading.record()


def test_several_threads_read_one_record(block_files: BlockFiles, path: Path) -> None:
    assert parse_header(path.read_bytes()[:HEADER_BYTES]).is_striped
    for _ in range(20):
        assert read_together(block_files.reading(KEY, SIZE)) == RECORD
    assert block_files.read(KEY, SIZE) == RECORD


def test_a_large_record_of_an_earlier_version_can_be_read(
    block_files: BlockFiles, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codec, "MIN_STRIPED_BYTES", 1 << 30)
    block_files.write([RECORD])
    assert not parse_header(path.read_bytes()[:HEADER_BYTES]).is_striped
    assert read_together(block_files.reading(KEY, SIZE)) == RECORD
    flip(path, STATE_AT + 3 * STRIPE_BYTES)
    with pytest.raises(CorruptBlock, match="checksum"):
        read_together(block_files.reading(KEY, SIZE))


def test_a_flipped_bit_anywhere_is_detected(block_files: BlockFiles, path: Path) -> None:
    chance = random.Random(5)
    stripes = [STATE_AT + number * STRIPE_BYTES for number in range(STRIPES)]
    inside = [start + chance.randrange(STRIPE_BYTES - 8) for start in stripes]
    for offset in (*stripes, *inside, *range(0, HEADER_BYTES, 7), SIZE - MAC_BYTES, SIZE - 1):
        mask = 1 << chance.randrange(8)
        flip(path, offset, mask)
        with pytest.raises(CorruptBlock):
            read_together(block_files.reading(KEY, SIZE))
        with pytest.raises(CorruptBlock):
            block_files.read(KEY, SIZE)
        flip(path, offset, mask)
    assert read_together(block_files.reading(KEY, SIZE)) == RECORD


def test_swapped_stripes_are_detected(block_files: BlockFiles, path: Path) -> None:
    raw = bytearray(path.read_bytes())
    one, other = (slice(at, at + STRIPE_BYTES) for at in (STATE_AT, STATE_AT + STRIPE_BYTES))
    raw[one], raw[other] = raw[other], raw[one]
    path.write_bytes(raw)
    with pytest.raises(CorruptBlock, match="checksum"):
        read_together(block_files.reading(KEY, SIZE))


def test_a_striped_record_is_refused_under_the_other_magic(
    block_files: BlockFiles, path: Path
) -> None:
    raw = path.read_bytes()
    path.write_bytes(codec.MAGIC + raw[len(codec.MAGIC) :])
    with pytest.raises(CorruptBlock, match="checksum"):
        read_together(block_files.reading(KEY, SIZE))
    whole = seal(replace(RECORD, blob=RECORD.blob[:STRIPE_BYTES]), SECRET)
    assert bytes(whole[0]).startswith(codec.MAGIC)


@pytest.mark.parametrize("size", [0, HEADER_BYTES, STATE_AT + 5 * STRIPE_BYTES, SIZE - 1])
def test_a_short_file_is_refused_before_memory_is_allocated(
    block_files: BlockFiles, path: Path, size: int
) -> None:
    def allocate(size_bytes: int) -> memoryview:
        raise AssertionError(size_bytes)

    os.truncate(path, size)
    with pytest.raises(CorruptBlock, match=f"{size} bytes instead of {SIZE}"):
        read_together(block_files.reading(KEY, SIZE, allocate))


class Watched:
    """Records the reads of a file's state. `then` is called before each."""

    def __init__(self, then: Callable[[int], None]) -> None:
        self.starts: list[int] = []
        self._then = then

    def calls(self) -> Calls:
        return replace(SYSTEM, preadv=self._preadv)

    def _preadv(self, handle: int, views: Any, start: int) -> int:
        if STATE_AT <= start < SIZE - MAC_BYTES:
            self.starts.append(start)
            self._then(len(self.starts))
        return os.preadv(handle, views, start)


def test_a_file_that_becomes_shorter_while_it_is_read_is_refused(
    open_files: Open, path: Path
) -> None:
    def cut(number: int) -> None:
        if number == 5:
            os.truncate(path, STATE_AT)

    block_files = open_files(Watched(cut).calls())
    with pytest.raises(CorruptBlock, match=r"truncated|instead of"):
        read_together(block_files.reading(KEY, SIZE))


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize(
    ("code", "raised"), [(errno.EIO, CorruptBlock), (errno.ENOMEM, OSError)], ids=str
)
def test_when_one_thread_fails_the_others_stop(
    open_files: Open, code: int, raised: type[Exception]
) -> None:
    def fail(number: int) -> None:
        if number >= 3:
            raise OSError(code, os.strerror(code))

    watched = Watched(fail)
    reading = open_files(watched.calls()).reading(KEY, SIZE)
    with pytest.raises(raised, match="memory" if code == errno.ENOMEM else "cannot be read"):
        read_together(reading)
    assert len(watched.starts) <= 2 + THREADS


@pytest.mark.usefixtures("path")
def test_an_abandoned_read_stops_early(open_files: Open) -> None:
    gone = threading.Event()
    watched = Watched(lambda number: gone.set() if number == 3 else None)
    reading = open_files(watched.calls()).reading(KEY, SIZE)
    assert read_together(reading, lambda: not gone.is_set()) is None
    assert len(watched.starts) <= 2 + THREADS
    assert read_together(open_files(SYSTEM).reading(KEY, SIZE), lambda: False) is None


@pytest.mark.parametrize("ending", ["read", "damaged", "unreadable", "unwanted"])
def test_memory_is_allocated_once_and_freed_with_the_record(
    open_files: Open, path: Path, ending: str
) -> None:
    """Late threads keep the reading but not its memory, even without garbage collection."""
    held: list[weakref.ref[Any]] = []

    def fail(_number: int) -> None:
        if ending == "unreadable" and held:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def allocate(size_bytes: int) -> memoryview:
        memory = np.empty(size_bytes, np.uint8)
        held.append(weakref.ref(memory))
        return memory.data

    if ending == "damaged":
        flip(path, SIZE - MAC_BYTES - 1)
    reading = open_files(Watched(fail).calls()).reading(KEY, SIZE, allocate)
    gc.disable()
    try:
        record = read_together(reading, lambda: ending != "unwanted" or not held)
    except CorruptBlock:
        record = None
    finally:
        gc.enable()
    assert (record is not None) == (ending == "read")
    del record
    [memory] = held
    assert memory() is None


def test_a_block_without_state_is_read(block_files: BlockFiles) -> None:
    empty = replace(RECORD, blob=b"")
    block_files.write([empty])
    assert read_together(block_files.reading(KEY, size_of(empty), plain_memory)) == empty
