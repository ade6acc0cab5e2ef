"""What an admin request was answered holds, whatever becomes of the process after it."""

from __future__ import annotations

import errno
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from rekindle.chat.prompt import Prompt
from rekindle.protocol.admin import (
    AdminOp,
    CollectExpired,
    DeleteEntry,
    EntryInfo,
    Flush,
    IndexPrompt,
    PinEntry,
    Removed,
    RemoveOld,
    RemoveSession,
)
from rekindle.protocol.requests import Names, Prepare
from rekindle.tokens import Tokens
from tests.stress.storage_harness import StorageHarness, load
from tests.stress.trouble import Trouble
from tests.support.fake import FakeEngine
from tests.support.harness import RuntimeHarness

PROMPT = Prompt(Tokens.of(range(300, 320)))


class Life:
    """A runtime on a folder, and what is left of it when it is killed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.harness = RuntimeHarness(FakeEngine(), folder=path / "live", idle_tokens=0)

    def after_a_kill(self) -> RuntimeHarness:
        """One that opens what lies on disk at this moment."""
        shutil.copytree(self._path / "live", self._path / "killed")
        return RuntimeHarness(FakeEngine(), folder=self._path / "killed")

    def key(self, *, pinned: bool = False, ttl_s: float | None = None) -> str:
        """Of a conversation that is on disk."""
        names = Names(return_cache_key=True, session_id="mine", ttl_s=ttl_s)
        key = self.harness.ask(range(100, 120), names=names).finished.cache.new_cache_key
        assert key is not None
        if pinned:
            self.harness.administer(PinEntry(key, pinned=True))
        self.harness.flush()
        return key


@pytest.fixture
def life(tmp_path: Path) -> Iterator[Life]:
    made = Life(tmp_path)
    yield made
    made.harness.close()


def entries_of(harness: RuntimeHarness) -> dict[str, bool]:
    """What it knows, and whether that is pinned."""
    found = {entry.key: entry.pinned for entry in harness.entries.of(None)}
    harness.close()
    return found


@pytest.mark.parametrize("pinned", [True, False])
def test_a_pin_that_was_answered_outlives_the_process(life: Life, pinned: bool) -> None:
    key = life.key(pinned=not pinned)
    life.harness.administer(PinEntry(key, pinned=pinned))
    assert entries_of(life.after_a_kill()) == {key: pinned}


@pytest.mark.parametrize(
    "op", [DeleteEntry, lambda _: RemoveSession("mine"), lambda _: RemoveOld(-1)]
)
def test_what_was_answered_as_deleted_never_comes_back(life: Life, op: type[DeleteEntry]) -> None:
    key = life.key()
    assert [block.stored for block in life.harness.store]
    answer = life.harness.administer(op(key))
    assert isinstance(answer, Removed)
    assert answer.durable
    again = life.after_a_kill()
    assert not len(again.store)
    assert entries_of(again) == {}


def test_what_was_answered_as_collected_never_comes_back(life: Life) -> None:
    life.key(ttl_s=1e-9)
    life.harness.administer(CollectExpired())
    assert entries_of(life.after_a_kill()) == {}


def test_a_prompt_that_was_only_indexed_outlives_the_process(life: Life) -> None:
    op = IndexPrompt(messages=[], prepare=Prepare(pinned=True, ttl_s=None))
    info = life.harness.administer(op, prompt=PROMPT)
    assert isinstance(info, EntryInfo)
    assert info.durable
    assert entries_of(life.after_a_kill()) == {info.cache_key: True}


# -- a disk that does not take it ----------------------------------------------------------------


def refuse(*_: object) -> None:
    raise sqlite3.OperationalError("disk I/O error")


def test_what_the_disk_does_not_take_is_done_in_memory_and_said_to_be_no_more(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, disk = life.key(), life.harness.disk
    assert disk is not None
    ops: list[AdminOp] = [PinEntry(key, pinned=True), Flush(key), DeleteEntry(key)]
    with monkeypatch.context() as patched:
        patched.setattr(disk.folder.index_db, "commit", refuse)
        for op in ops:
            answer = life.harness.administer(op)
            assert isinstance(answer, EntryInfo | Removed)
            assert not answer.durable
    assert not life.harness.entries.of(None)
    life.harness.storage.tick()
    life.harness.flush()  # the disk is back: what it missed is made up for
    assert entries_of(life.after_a_kill()) == {}


def test_a_file_that_cannot_be_removed_is_tried_again_and_said_to_be_there(tmp_path: Path) -> None:
    trouble = Trouble(("unlink",))
    harness = StorageHarness(FakeEngine(), load(tmp_path / "kv"), trouble.calls())
    reply = harness.ask(range(100, 120), names=Names(return_cache_key=True))
    key = reply.finished.cache.new_cache_key
    assert key is not None
    harness.administer(Flush(key))
    blocks = harness.tier.folder.path / "blocks"
    assert list(blocks.iterdir())
    trouble.error = errno.EIO
    answer = harness.administer(DeleteEntry(key))
    assert isinstance(answer, Removed)
    assert not answer.durable
    trouble.error = None
    harness.storage.tick()
    harness.flush()
    assert not list(blocks.iterdir())
    harness.close()


def test_without_a_disk_there_is_nothing_to_wait_for() -> None:
    harness = RuntimeHarness(FakeEngine())
    reply = harness.ask(range(100, 120), names=Names(return_cache_key=True))
    answers = []
    key = reply.finished.cache.new_cache_key
    assert key is not None
    for op in (PinEntry(key, pinned=True), DeleteEntry(key)):
        answers.append(harness.administer(op))
    assert [answer.durable for answer in answers if isinstance(answer, EntryInfo | Removed)] == [
        True,
        True,
    ]
