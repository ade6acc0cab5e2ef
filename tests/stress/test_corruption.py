"""A damaged block file is a cache miss.

The answer equals the cold one, the engine never sees the bytes, the file is quarantined and a
counter counts it.
"""

from __future__ import annotations

import os
import pickle
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from rekindle.kvcache.codec import HEADER_BYTES
from rekindle.kvcache.disk.check import check
from tests.stress.shelf import BLOCK_TOKENS, Shelf, write_shelf
from tests.support.fake import FakeEngine
from tests.support.harness import RuntimeHarness
from tests.support.rounds import rounds

HEADER_STEP = rounds(3, 1)  # the long form flips every byte of the header
FLIPS = rounds(12, 120)  # bytes of each file after the header
CUTS = rounds(8, 80)
NUMBERS = range(6)  # five full blocks and a tail

Spoil = Callable[[Path], None]


class Canary:
    """Creates a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self._path),)


@dataclass
class OtherEngine(FakeEngine):
    """An engine with another model."""

    fingerprint: bytes = b"other"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    shelf = write_shelf(tmp_path_factory.mktemp("shelf") / "kv")
    assert len(shelf.blocks) == len(NUMBERS)
    return shelf


@pytest.fixture
def shelf(original: Shelf, tmp_path: Path) -> Shelf:
    return original.copy(tmp_path / "kv")


def flip(path: Path, offset: int, mask: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[offset] ^= mask
    path.write_bytes(raw)


def spoil_in_use(original: Shelf, folder: Path, number: int, spoil: Spoil) -> None:
    """Damage a file under an open harness, and check that the damage is noticed."""
    shelf = original.copy(folder)
    harness = shelf.open()
    spoil(shelf.file(number))
    is_noticed(shelf, harness, number)
    harness.close()
    if number < NUMBERS[-1]:  # a longer block replaced the tail
        good = original.file(number).read_bytes()
        assert shelf.file(number).read_bytes() == good, "computed anew, and stored anew"
    assert not (shelf.folder / "sang").exists()
    shutil.rmtree(folder)


def is_noticed(shelf: Shelf, harness: RuntimeHarness, number: int) -> None:
    assert harness.disk is not None
    reply = shelf.ask(harness)
    report = reply.finished.cache
    assert reply.reused == number * BLOCK_TOKENS, "what is good is reused"
    assert (report.status, report.reason) == ("partial_hit" if number else "miss", "corrupt")
    assert harness.disk.counts.corrupt_blocks == 1
    harness.flush()
    assert [path.name[-64:] for path in shelf.quarantine] == [shelf.blocks[number]]


@pytest.mark.long
@pytest.mark.parametrize("number", NUMBERS)
def test_a_flipped_byte_anywhere_is_noticed(original: Shelf, tmp_path: Path, number: int) -> None:
    """Flips bytes in the header, and as many bytes of the payload as there is time for."""
    chance = random.Random(number)
    behind = range(HEADER_BYTES, original.file(number).stat().st_size)
    for offset in (
        *range(0, HEADER_BYTES, HEADER_STEP),
        *chance.sample(behind, min(FLIPS, len(behind))),
    ):
        mask = 1 << chance.randrange(8)
        spoil_in_use(original, tmp_path / "kv", number, partial(flip, offset=offset, mask=mask))


@pytest.mark.long
@pytest.mark.parametrize("number", NUMBERS)
def test_a_file_truncated_anywhere_is_noticed(original: Shelf, tmp_path: Path, number: int) -> None:
    chance = random.Random(number)
    size = original.file(number).stat().st_size
    for keep in (0, 1, HEADER_BYTES, size - 1, *chance.sample(range(size), CUTS)):
        spoil_in_use(original, tmp_path / "kv", number, partial(cut, keep=keep))


def cut(path: Path, keep: int = 100) -> None:
    os.truncate(path, keep)


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def become_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "inside").write_bytes(b"?")


def become_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def become_a_link(path: Path) -> None:
    """Replace the file by a link to a good copy. Links are never followed."""
    elsewhere = path.parents[2] / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def become_foreign(path: Path) -> None:
    path.write_bytes(random.Random(0).randbytes(path.stat().st_size))


def become_a_pickle(path: Path) -> None:
    canary = Canary(path.parents[2] / "sang")
    path.write_bytes(pickle.dumps(canary).ljust(path.stat().st_size, b"."))


def become_another_block(path: Path) -> None:
    """Replace the file by the next good block, which has the same length and a valid signature."""
    others = sorted(path.parent.glob("[0-9a-f]*"))
    as_long = [other for other in others if other.stat().st_size == path.stat().st_size]
    path.write_bytes(as_long[as_long.index(path) - 1].read_bytes())


SPOILT = (
    lengthen,
    zero,
    become_a_folder,
    become_a_pipe,
    become_a_link,
    become_foreign,
    become_a_pickle,
    become_another_block,
)


@pytest.mark.parametrize("spoil", SPOILT)
@pytest.mark.parametrize("number", [0, 2])
def test_anything_that_replaces_a_file_is_noticed(
    original: Shelf, tmp_path: Path, spoil: Spoil, number: int
) -> None:
    spoil_in_use(original, tmp_path / "kv", number, spoil)


def test_two_swapped_files_are_noticed(shelf: Shelf) -> None:
    harness = shelf.open()
    one, two = shelf.file(1), shelf.file(2)
    one_bytes, two_bytes = one.read_bytes(), two.read_bytes()
    one.write_bytes(two_bytes)
    two.write_bytes(one_bytes)
    assert harness.disk is not None
    assert shelf.ask(harness).reused == BLOCK_TOKENS
    assert harness.disk.counts.corrupt_blocks >= 1
    harness.close()
    assert (one.read_bytes(), two.read_bytes()) == (one_bytes, two_bytes)


def test_a_missing_file_is_a_miss(shelf: Shelf) -> None:
    harness = shelf.open()
    shelf.file(3).unlink()
    reply = shelf.ask(harness)
    assert reply.reused == 3 * BLOCK_TOKENS
    assert reply.finished.cache.reason == "corrupt"
    harness.close()
    assert shelf.file(3).exists(), "computed anew, and stored anew"


def test_without_any_file_everything_is_computed(shelf: Shelf) -> None:
    harness = shelf.open()
    for number in NUMBERS:
        shelf.file(number).unlink()
    assert shelf.ask(harness).reused == 0
    assert shelf.ask(harness).reused == len(shelf.tokens) - 1
    harness.close()


@pytest.mark.parametrize("spoil", [*SPOILT, cut, Path.unlink])
@pytest.mark.parametrize("number", [0, 2])
def test_damage_between_two_starts_costs_only_computing(
    shelf: Shelf, spoil: Spoil, number: int
) -> None:
    spoil(shelf.file(number))
    harness = shelf.open()
    assert shelf.ask(harness).reused == number * BLOCK_TOKENS
    assert shelf.ask(harness).reused == len(shelf.tokens) - 1
    harness.close()
    [report] = check(shelf.folder, repair=False)
    assert report.findings == ()
    assert not (shelf.folder / "sang").exists()


def test_blocks_of_another_model_are_never_reused(shelf: Shelf) -> None:
    """Both models have the same secret, so the signatures are valid. The namespace is not."""
    mine = shelf.model / "blocks"
    other = RuntimeHarness(OtherEngine(), folder=shelf.folder)
    other.ask(shelf.tokens)
    other.close()
    assert other.disk is not None
    theirs = sorted((other.disk.folder.path / "blocks").iterdir())
    assert not {path.name for path in theirs} & set(shelf.blocks)
    for path in theirs:
        shutil.copy(path, mine / path.name)
    shutil.copy(theirs[0], mine / shelf.blocks[1])
    harness = shelf.open()
    reply = shelf.ask(harness)
    assert (reply.reused, reply.finished.cache.reason) == (BLOCK_TOKENS, "corrupt")
    harness.close()
