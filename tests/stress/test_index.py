"""A damaged index costs at most what only the index knew.

Answers are right, names come back from the backup, and blocks come back from their files.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from rekindle.kvcache.disk.check import check
from rekindle.kvcache.entries.entries import Entry
from rekindle.protocol.requests import Names
from rekindle.tokens import pack
from tests.support.fake import FakeEngine, NumberTokenizer
from tests.support.harness import Reply, RuntimeHarness
from tests.support.rounds import rounds

QUESTION = "".join(f"{n} " for n in range(100, 128))
FLIPS = rounds(40, 400)
CUTS = rounds(10, 100)
EARLY, LATE = ("session_id", "early"), ("session_id", "late")

Spoil = Callable[[Path], None]


class WordTokenizer(NumberTokenizer):
    """Also accepts words that are not numbers."""

    def encode(self, text: str, *, special: bool) -> list[int]:
        return [int(word) if word.isdecimal() else 9 for word in text.split()]


def open_harness(folder: Path | None) -> RuntimeHarness:
    engine = FakeEngine()
    engine.tokenizer = WordTokenizer()
    return RuntimeHarness(engine, folder=folder, idle_tokens=0)


def ask(harness: RuntimeHarness, text: str, session: str | None = None) -> Reply:
    """Ask in words, as clients do. The remembered text decides the tokens."""
    return harness.ask_text(text, names=Names(session_id=session))


def converse(harness: RuntimeHarness, session: str, turns: int) -> str:
    text = f"{len(session)} {QUESTION}"
    for turn in range(turns):
        text += ask(harness, text, session).text + f"{turn + 10} "
    return text


@dataclass(frozen=True)
class Wreck:
    """The folder of a killed process: an index, its log and an older backup."""

    folder: Path
    texts: dict[str, str]  # by session
    cold: dict[str, list[int]]

    @property
    def index(self) -> Path:
        [model] = (path for path in self.folder.iterdir() if path.is_dir())
        return model / "index.db"

    @property
    def log(self) -> Path:
        return self.index.with_name("index.db-wal")

    def copy(self, to: Path) -> Wreck:
        shutil.copytree(self.folder, to)
        return Wreck(to, self.texts, self.cold)

    def serves(self) -> dict[str, Entry]:
        """Continue both conversations, check the answers, and return the names that are still
        known."""
        harness = open_harness(self.folder)
        named = {
            name: entry
            for kind, name in (EARLY, LATE)
            if (entry := harness.entries.by_name(harness.namespace(), (kind, name)))
        }
        for session, text in self.texts.items():
            assert ask(harness, text, session).tokens == self.cold[session]
        harness.close()
        return named


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Wreck:
    folder = tmp_path_factory.mktemp("wreck")
    harness = open_harness(folder / "live")
    assert harness.disk is not None
    early = converse(harness, "early", 3)
    harness.disk.back_up({})
    late = converse(harness, "late", 2)
    harness.flush()
    shutil.copytree(folder / "live", folder / "kv")  # as a killed process leaves it
    harness.close()
    texts = {"early": early, "late": late}
    cold = {session: ask(open_harness(None), text).tokens for session, text in texts.items()}
    wreck = Wreck(folder / "kv", texts, cold)
    assert wreck.log.stat().st_size > 4096
    return wreck


@pytest.fixture
def wreck(original: Wreck, tmp_path: Path) -> Wreck:
    return original.copy(tmp_path / "kv")


def flip(path: Path, offset: int, mask: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[offset] ^= mask
    path.write_bytes(raw)


def cut(path: Path, keep: int) -> None:
    os.truncate(path, keep)


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def garble(path: Path) -> None:
    path.write_bytes(random.Random(1).randbytes(path.stat().st_size))


def become_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def become_a_link(path: Path) -> None:
    path.rename(path.with_suffix(".elsewhere"))
    path.symlink_to(path.with_suffix(".elsewhere"))


def test_a_killed_process_loses_nothing(wreck: Wreck) -> None:
    """All other tests in this file rely on this."""
    assert wreck.serves().keys() == {"early", "late"}


WHOLESALE = (Path.unlink, zero, garble, partial(cut, keep=0), become_a_folder, become_a_link)


@pytest.mark.parametrize("spoil", WHOLESALE)
def test_a_lost_index_is_rebuilt_with_the_names_of_its_backup(wreck: Wreck, spoil: Spoil) -> None:
    spoil(wreck.index)
    assert "early" in wreck.serves()
    [report] = check(wreck.folder, repair=False)
    assert report.findings == ()


@pytest.mark.parametrize("spoil", WHOLESALE)
def test_a_lost_log_costs_only_its_own_content(wreck: Wreck, spoil: Spoil) -> None:
    spoil(wreck.log)
    assert "early" in wreck.serves()
    [report] = check(wreck.folder, repair=False)
    assert report.findings == ()


@pytest.mark.parametrize("spoil", WHOLESALE)
def test_without_index_and_backup_blocks_are_recovered_from_their_headers(
    wreck: Wreck, spoil: Spoil
) -> None:
    spoil(wreck.index)
    spoil(wreck.index.with_name("index.db.bak"))
    assert wreck.serves() == {}
    harness = open_harness(wreck.folder)
    assert ask(harness, wreck.texts["early"]).reused > len(QUESTION.split())
    harness.close()


@pytest.mark.long
@pytest.mark.parametrize("name", ["index.db", "index.db-wal"])
def test_a_flipped_byte_anywhere_in_the_index_makes_no_answer_wrong(
    original: Wreck, tmp_path: Path, name: str
) -> None:
    """SQLite notices some flips, and our own checks notice others. At most a name is lost."""
    chance = random.Random(name)
    raw = original.index.with_name(name).read_bytes()
    used = [
        offset for offset, byte in enumerate(raw) if byte
    ]  # damage in empty pages has no effect
    for offset in (*range(0, 100, 3), *chance.sample(used, FLIPS)):
        wreck = original.copy(tmp_path / "kv")
        flip(wreck.index.with_name(name), offset, 1 << chance.randrange(8))
        wreck.serves()
        shutil.rmtree(wreck.folder)


@pytest.mark.long
@pytest.mark.parametrize("name", ["index.db", "index.db-wal"])
def test_an_index_truncated_anywhere_makes_no_answer_wrong(
    original: Wreck, tmp_path: Path, name: str
) -> None:
    chance = random.Random(name)
    size = original.index.with_name(name).stat().st_size
    for keep in chance.sample(range(size), CUTS):
        wreck = original.copy(tmp_path / "kv")
        cut(wreck.index.with_name(name), keep)
        assert "early" in wreck.serves()
        shutil.rmtree(wreck.folder)


def test_an_entry_whose_tokens_contradict_its_text_is_not_trusted(wreck: Wreck) -> None:
    """SQLite has no checksums, so it may return other data than was stored."""
    open_harness(wreck.folder).close()  # the log becomes part of the index
    tokens = pack([len("early"), *range(100, 128)])
    raw = wreck.index.read_bytes()
    spoilt = raw.replace(tokens, pack([len("early"), 999, *range(101, 128)]))
    assert spoilt != raw
    wreck.index.write_bytes(spoilt)
    wreck.serves()
