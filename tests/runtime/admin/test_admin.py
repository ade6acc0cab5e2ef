"""An answered admin request holds even if the process is killed right after."""

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
    """A runtime with a cache folder that can be killed and reopened."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.harness = RuntimeHarness(FakeEngine(), folder=path / "live", idle_tokens=0)

    def after_a_kill(self) -> RuntimeHarness:
        """Open a runtime with a copy of the folder as it is now."""
        shutil.copytree(self._path / "live", self._path / "killed")
        return RuntimeHarness(FakeEngine(), folder=self._path / "killed")

    def key(self, *, pinned: bool = False, ttl_s: float | None = None) -> str:
        """Store a conversation on disk and return its key."""
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
    """Map the keys of all entries to whether they are pinned."""
    found = {entry.key: entry.pinned for entry in harness.entries.of(None)}
    harness.close()
    return found


@pytest.mark.parametrize("pinned", [True, False])
def test_an_answered_pin_survives_a_crash(life: Life, pinned: bool) -> None:
    key = life.key(pinned=not pinned)
    life.harness.administer(PinEntry(key, pinned=pinned))
    assert entries_of(life.after_a_kill()) == {key: pinned}


@pytest.mark.parametrize(
    "op", [DeleteEntry, lambda _: RemoveSession("mine"), lambda _: RemoveOld(-1)]
)
def test_a_deleted_entry_does_not_return_after_a_crash(life: Life, op: type[DeleteEntry]) -> None:
    key = life.key()
    assert [block.stored for block in life.harness.store]
    answer = life.harness.administer(op(key))
    assert isinstance(answer, Removed)
    assert answer.durable
    again = life.after_a_kill()
    assert not len(again.store)
    assert entries_of(again) == {}


def test_a_collected_entry_does_not_return_after_a_crash(life: Life) -> None:
    life.key(ttl_s=1e-9)
    life.harness.administer(CollectExpired())
    assert entries_of(life.after_a_kill()) == {}


def test_an_indexed_prompt_survives_a_crash(life: Life) -> None:
    op = IndexPrompt(messages=[], prepare=Prepare(pinned=True, ttl_s=None))
    info = life.harness.administer(op, prompt=PROMPT)
    assert isinstance(info, EntryInfo)
    assert info.durable
    assert entries_of(life.after_a_kill()) == {info.cache_key: True}


# -- a failing disk --


def refuse(*_: object) -> None:
    raise sqlite3.OperationalError("disk I/O error")


def test_a_change_that_the_disk_rejects_applies_in_memory_and_is_reported_as_not_durable(
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
    life.harness.tick()
    life.harness.flush()  # the disk works again and catches up
    assert entries_of(life.after_a_kill()) == {}


def test_removing_an_undeletable_file_is_reported_and_tried_again(tmp_path: Path) -> None:
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
    harness.tick()
    harness.flush()
    assert not list(blocks.iterdir())
    harness.close()


def test_without_a_disk_the_reply_comes_immediately() -> None:
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
