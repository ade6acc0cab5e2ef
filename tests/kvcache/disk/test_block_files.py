from __future__ import annotations

import errno
import os
import random
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, chdir, suppress
from pathlib import Path
from typing import Protocol

import pytest

from rekindle.errors import CorruptBlock
from rekindle.kvcache.codec import HEADER_BYTES, Record, seal
from rekindle.kvcache.disk.block_files import MAX_QUARANTINED, BlockFiles
from rekindle.kvcache.disk.files import SYSTEM, Calls, Files
from tests.kvcache.faults import ERRORS, KINDS, Faults, PulledPlug, each_failure
from tests.kvcache.records import SECRET, chain, flip, key_of, size_of

RECORD = chain(1)[0]
KEY, SIZE = key_of(RECORD), size_of(RECORD)


class Place:
    """The block files and their folder."""

    def __init__(self, path: Path, calls: Calls, secret: bytes) -> None:
        path.mkdir(exist_ok=True)
        self.blocks, self.quarantine = path / "blocks", path / "aside"
        self._files, self._quarantine = Files(self.blocks, calls), Files(self.quarantine, calls)
        self.block_files = BlockFiles(self._files, secret, self._quarantine)

    def file(self, key: bytes = KEY) -> Path:
        return self.blocks / key.hex()

    def close(self) -> None:
        self._files.close()
        self._quarantine.close()


class Opener(Protocol):
    def __call__(self, name: str = ..., calls: Calls = ..., secret: bytes = ...) -> Place: ...


@pytest.fixture
def open_place(tmp_path: Path) -> Iterator[Opener]:
    """Opens block files and closes them after the test."""
    with ExitStack() as opened:

        def open_one(name: str = "model", calls: Calls = SYSTEM, secret: bytes = SECRET) -> Place:
            made = Place(tmp_path / name, calls, secret)
            opened.callback(made.close)
            return made

        yield open_one


@pytest.fixture
def place(open_place: Opener) -> Place:
    made = open_place()
    made.block_files.write([RECORD])
    return made


def refuse(place: Place, match: str = r".") -> None:
    with pytest.raises(CorruptBlock, match=match):
        place.block_files.read(KEY, SIZE)


def test_written_blocks_are_read_back(place: Place) -> None:
    records = chain(5, seed=1)
    place.block_files.write(records)
    for record in records:
        assert place.block_files.read(key_of(record), size_of(record)) == record
    sizes = {key_of(record): size_of(record) for record in [RECORD, *records]}
    assert place.block_files.sizes() == sizes
    assert place.block_files.foreign() == []


def test_the_state_is_read_into_a_buffer_of_its_own(place: Place) -> None:
    blob = place.block_files.read(KEY, SIZE).blob
    assert isinstance(blob, memoryview)
    assert len(blob) == len(RECORD.blob)


def test_the_same_block_twice_in_a_batch_is_written_once(place: Place) -> None:
    exact = Record(RECORD.namespace, RECORD.parent, RECORD.tokens, RECORD.blob, exact=True)
    place.block_files.write([RECORD, exact])
    assert place.block_files.read(KEY, SIZE).exact


def test_a_file_is_named_by_its_key_and_a_key_is_never_a_path(place: Place) -> None:
    assert [path.name for path in place.blocks.iterdir()] == [KEY.hex()]
    for bad in (b"", b"../../secret", KEY + b"/"):
        for act in (place.block_files.tentative, place.block_files.quarantine):
            with pytest.raises(ValueError, match="key"):
                act(bad)
        with pytest.raises(ValueError, match="key"):
            place.block_files.read(bad, SIZE)
        with pytest.raises(ValueError, match="key"):
            place.block_files.remove([bad])


# -- every way of being bad ----------------------------------------------------------------------


def test_every_flipped_byte_is_noticed(place: Place) -> None:
    chance = random.Random(3)
    place.block_files.write([big := chain(1, seed=4, blob_bytes=2000)[0]])
    path, size = place.file(key_of(big)), size_of(big)
    payload = chance.sample(range(HEADER_BYTES, size), 300)
    for offset in [*range(HEADER_BYTES), *payload, *range(size - 32, size)]:
        mask = 1 << chance.randrange(8)
        flip(path, offset, mask)
        with pytest.raises(CorruptBlock):
            place.block_files.read(key_of(big), size)
        flip(path, offset, mask)
    assert place.block_files.read(key_of(big), size) == big


def test_every_truncation_is_noticed(place: Place) -> None:
    whole = place.file().read_bytes()
    for length in range(len(whole)):
        place.file().write_bytes(whole[:length])
        refuse(place)
        with pytest.raises(CorruptBlock):  # nor when the index was wrong in the same way
            place.block_files.read(KEY, length)
        with pytest.raises(CorruptBlock):
            place.block_files.tentative(KEY)
    place.file().write_bytes(whole + b"\0")
    refuse(place, "bytes instead of")


def test_a_zeroed_file_is_noticed(place: Place) -> None:
    place.file().write_bytes(bytes(SIZE))
    refuse(place, "not a block record")


def test_a_block_under_another_blocks_name_is_noticed(place: Place) -> None:
    other = chain(1, seed=9)[0]
    place.file().write_bytes(b"".join(seal(other, SECRET)))
    refuse(place, "another block")
    with pytest.raises(CorruptBlock, match="another block"):
        place.block_files.tentative(KEY)


def test_a_block_of_another_secret_is_noticed(place: Place, open_place: Opener) -> None:
    place.close()
    stranger = open_place(secret=b"t" * 32)
    with pytest.raises(CorruptBlock, match="checksum"):
        stranger.block_files.read(KEY, SIZE)


def test_a_header_that_claims_gigabytes_allocates_nothing(place: Place) -> None:
    with place.file().open("r+b") as file:
        file.seek(4)
        file.write((1 << 40).to_bytes(8, "big"))
    refuse(place, "length disagrees")
    with pytest.raises(CorruptBlock):
        place.block_files.tentative(KEY)


def _folder(path: Path) -> None:
    path.mkdir()


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener, chdir(path.parent):  # its path may be too long
        listener.bind(path.name)


def _link(path: Path) -> None:
    target = path.parent.parent / "target"
    target.write_bytes(b"".join(seal(RECORD, SECRET)))
    path.symlink_to(target)


def _loop(path: Path) -> None:
    path.symlink_to(path.name)


IMPOSTORS: list[Callable[[Path], None]] = [_folder, os.mkfifo, _socket, _link, _loop]


@pytest.mark.parametrize("make", IMPOSTORS, ids=["folder", "pipe", "socket", "link", "loop"])
def test_an_item_that_is_not_a_file_is_refused_and_moved_away(
    place: Place, make: Callable[[Path], None]
) -> None:
    place.file().unlink()
    make(place.file())
    refuse(place)
    with pytest.raises(CorruptBlock):
        place.block_files.tentative(KEY)
    assert place.block_files.sizes() == {}
    assert place.block_files.foreign() == [KEY.hex()]
    assert place.block_files.tidy() == (set(), 1)
    place.block_files.write([RECORD])
    assert place.block_files.read(KEY, SIZE) == RECORD


def test_a_missing_file_is_reported(place: Place) -> None:
    place.file().unlink()
    refuse(place, "missing")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_file_is_reported(place: Place) -> None:
    place.file().chmod(0)
    refuse(place, "cannot be read")


def reading_fails(open_place: Opener, kind: str, error: int) -> Place:
    return open_place(calls=Faults(kind, 1, error).calls())


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("kind", ["open", "preadv"])
def test_a_disk_that_fails_to_read_is_a_bad_block(kind: str, open_place: Opener) -> None:
    refuse(reading_fails(open_place, kind, errno.EIO), "cannot be read")


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_a_lack_of_handles_or_memory_does_not_mark_the_file_as_bad(
    error: int, open_place: Opener
) -> None:
    with pytest.raises(OSError, match=r".") as raised:
        reading_fails(open_place, "open", error).block_files.read(KEY, SIZE)
    assert raised.value.errno == error


# -- looking, quarantine, removing ---------------------------------------------------------------


def test_the_place_of_a_block_is_read_without_its_state(place: Place) -> None:
    header, tokens, size = place.block_files.tentative(KEY)
    assert (header.parent, header.namespace, header.exact) == (
        RECORD.parent,
        RECORD.namespace,
        False,
    )
    assert (tokens, size) == (RECORD.tokens, SIZE)


def test_a_bad_file_is_quarantined(place: Place) -> None:
    flip(place.file(), 100)
    bad = place.file().read_bytes()
    place.block_files.quarantine(KEY)
    assert place.block_files.sizes() == {}
    assert [path.read_bytes() for path in place.quarantine.iterdir()] == [bad]
    place.block_files.quarantine(KEY)  # it is not there any more: fine


def test_only_the_latest_bad_files_are_kept(place: Place) -> None:
    for turn in range(MAX_QUARANTINED + 5):
        place.file().write_bytes(b"%d" % turn)
        place.block_files.quarantine(KEY)
    kept = sorted(path.name for path in place.quarantine.iterdir())
    assert [int((place.quarantine / name).read_bytes()) for name in kept] == list(
        range(5, MAX_QUARANTINED + 5)
    )


def test_the_quarantine_has_a_byte_limit(place: Place) -> None:
    place.block_files.max_quarantine_bytes = 250
    for _ in range(4):
        place.file().write_bytes(bytes(100))
        place.block_files.quarantine(KEY)
    assert len(list(place.quarantine.iterdir())) == 2


def test_a_bad_file_that_cannot_be_quarantined_is_removed(open_place: Opener) -> None:
    place = open_place(calls=Faults("replace", 2, errno.ENOSPC).calls())
    place.block_files.write([RECORD])
    place.block_files.quarantine(KEY)
    assert (place.block_files.sizes(), list(place.quarantine.iterdir())) == ({}, [])


def test_other_files_are_removed_if_one_cannot_be(open_place: Opener) -> None:
    place = open_place(calls=Faults("unlink", 1, errno.EACCES).calls())
    records = chain(3)
    place.block_files.write(records)
    with pytest.raises(PermissionError):
        place.block_files.remove(list(map(key_of, records)))
    assert place.block_files.sizes().keys() == {key_of(records[0])}
    place.block_files.remove(list(map(key_of, records)))
    assert place.block_files.sizes() == {}


def test_foreign_files_are_listed_and_can_be_quarantined(place: Place) -> None:
    for name in ("notes.txt", "AB" * 32, "ab" * 31, f"{KEY.hex()}\n", "\uff0e\uff0e"):
        (place.blocks / name).touch()
    assert place.block_files.sizes().keys() == {KEY}
    assert len(place.block_files.foreign()) == 5
    place.block_files.quarantine_foreign()
    assert place.block_files.foreign() == []
    assert place.block_files.read(KEY, SIZE) == RECORD


@pytest.mark.parametrize("error", [*ERRORS, PulledPlug], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_that_fails_anywhere_leaves_only_good_blocks(
    kind: str, error: int | type[BaseException], open_place: Opener
) -> None:
    old, new = chain(3), chain(3, blob_bytes=50)  # the same blocks with other states
    for turn, faults in enumerate(each_failure(kind, error)):
        open_place(str(turn)).block_files.write(old)
        with suppress(OSError, PulledPlug):
            open_place(str(turn), faults.calls()).block_files.write(new)
        block_files = open_place(str(turn)).block_files
        block_files.sweep()
        assert block_files.unfinished() == block_files.foreign() == []
        for before, after in zip(old, new, strict=True):
            key = key_of(before)
            assert block_files.read(key, block_files.sizes()[key]) in (before, after)


def test_the_free_space_is_reported(place: Place) -> None:
    assert place.block_files.free_bytes() > 0
