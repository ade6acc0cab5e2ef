"""The files of encoded images stay within their budget, even if the disk fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue

import pytest

from rekindle.kvcache.disk.files import Files
from rekindle.kvcache.disk.image_files import FOLDER, EncodedPicture, PictureFiles, PictureRead

SECRET = b"s" * 32
KEYS = [bytes([number]) * 32 for number in range(4)]
PICTURE = EncodedPicture(2, 4, bytes(32))
PATIENCE_S = 30.0

Opener = Callable[[int], "Opened"]


class Opened:
    """Image files whose orders are done when a method returns."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self._reads: SimpleQueue[PictureRead] = SimpleQueue()
        self.files = PictureFiles(folder, SECRET, self._reads.put, limit_bytes=limit_bytes)
        self._is_closed = False

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self.files.close()

    def read(self, key: bytes) -> PictureRead:
        self.files.read(key)
        return self._reads.get(timeout=PATIENCE_S)

    def write(self, *keys: bytes) -> None:
        for key in keys:
            self.files.write(key, PICTURE)
        self.read(b"a stranger".ljust(32))  # one thread does all the work in order


@pytest.fixture
def open_one(tmp_path: Path) -> Iterator[Opener]:
    made: list[Opened] = []

    def open_one(limit_bytes: int) -> Opened:
        made.append(Opened(tmp_path, limit_bytes))
        return made[-1]

    yield open_one
    for each in made:
        each.close()


@pytest.fixture
def size(open_one: Opener, tmp_path: Path) -> int:
    """The size of one image's file."""
    first = open_one(1 << 20)
    first.write(KEYS[0])
    [file] = (tmp_path / FOLDER).iterdir()
    size = file.stat().st_size
    first.close()
    file.unlink()
    return size


def stored(folder: Path) -> list[bytes]:
    return sorted(bytes.fromhex(file.name) for file in (folder / FOLDER).iterdir())


def refuse_unlink(patched: pytest.MonkeyPatch) -> None:
    def unlink(files: Files, name: str) -> None:
        raise PermissionError("read-only")

    patched.setattr(Files, "unlink", unlink)


def test_a_file_that_cannot_be_removed_still_counts(
    open_one: Opener, size: int, tmp_path: Path
) -> None:
    opened = open_one(2 * size)
    opened.write(*KEYS[:2])
    with pytest.MonkeyPatch.context() as patched:
        refuse_unlink(patched)
        opened.write(KEYS[2])
        assert stored(tmp_path) == KEYS[:2]
        assert opened.files.used_bytes == 2 * size
        assert not opened.files.holds(KEYS[2])
    opened.write(KEYS[3])
    assert stored(tmp_path) == [KEYS[1], KEYS[3]]
    assert opened.files.used_bytes == 2 * size


def test_files_beyond_a_smaller_budget_count_until_they_can_be_removed(
    open_one: Opener, size: int, tmp_path: Path
) -> None:
    first = open_one(3 * size)
    first.write(*KEYS[:3])
    first.close()
    with pytest.MonkeyPatch.context() as patched:
        refuse_unlink(patched)
        second = open_one(size)
        assert second.read(KEYS[1]).picture == PICTURE
        assert second.files.used_bytes == 3 * size
    second.write(KEYS[3])
    assert stored(tmp_path) == [KEYS[3]]
    assert second.files.used_bytes == size


def test_an_image_whose_write_failed_does_not_count(
    open_one: Opener, size: int, tmp_path: Path
) -> None:
    opened = open_one(2 * size)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Files, "write", lambda *_: (_ for _ in ()).throw(OSError("full")))
        opened.write(KEYS[0])
    assert (opened.files.used_bytes, opened.files.holds(KEYS[0])) == (0, False)
    opened.write(KEYS[0], KEYS[0])
    assert opened.files.used_bytes == size
    assert stored(tmp_path) == [KEYS[0]]
