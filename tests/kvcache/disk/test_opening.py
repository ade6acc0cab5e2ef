"""Tests that a folder is opened in the background while turns use RAM."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from rekindle.kvcache.disk import opening
from rekindle.kvcache.disk.folder import Folder, open_folder
from rekindle.kvcache.tiers.base import BlocksFound, TierEvent
from rekindle.kvcache.tiers.disk import DiskTier
from rekindle.protocol.admin import DeleteEntry, EntryInfo, PinEntry, Removed
from rekindle.protocol.requests import Names
from tests.stress.storage_harness import StorageHarness, load
from tests.support.fake import FakeEngine

QUESTION = list(range(100, 160))
T = TypeVar("T")


class Gate:
    """Lets a thread pass step by step."""

    def __init__(self) -> None:
        self._passes = threading.Semaphore(0)

    def open(self, times: int = 10_000) -> None:
        self._passes.release(times)

    def guard(self, items: Iterator[T]) -> Iterator[T]:
        for item in items:
            self._passes.acquire()
            yield item


class SlowlyOpened(StorageHarness):
    """A harness that does not wait for its folder."""

    def settle(self) -> None:
        """The test decides when to wait."""

    def await_folder(self) -> None:
        super().settle()


@pytest.fixture
def folder(tmp_path: Path) -> tuple[Path, str, list[int]]:
    """A closed folder with one conversation. Returns its key and tokens."""
    harness = StorageHarness(FakeEngine(), load(tmp_path / "kv"))
    reply = harness.ask(QUESTION, names=Names(return_cache_key=True, session_id="mine"))
    key = reply.finished.cache.new_cache_key
    assert key is not None
    harness.close()
    return tmp_path / "kv", key, reply.turn.tokens.ids


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Pauses between blocks, which are loaded one by one."""
    gate, listed = Gate(), opening.stored_blocks
    monkeypatch.setattr(opening, "CHUNK_BLOCKS", 1)
    monkeypatch.setattr(opening, "stored_blocks", lambda rows: gate.guard(listed(rows)))
    return gate


def until(harness: StorageHarness, is_so: Callable[[], bool]) -> None:
    while not is_so():
        harness.take_events(wait=True)


def test_turns_use_ram_while_the_folder_is_loaded(
    folder: tuple[Path, str, list[int]], gate: Gate
) -> None:
    path, key, tokens = folder
    harness = SlowlyOpened(FakeEngine(), load(path))
    until(harness, lambda: bool(harness.entries.of(None)))  # known before its blocks are
    assert harness.disk_state == "opening"
    assert harness.converse(1, turns=2).finished.cache.tier == "ram"
    gate.open(2)
    until(harness, lambda: harness.held == 2)
    assert 0 < harness.ask([*tokens, 7], names=Names(cache_key=key)).reused < len(tokens)
    gate.open()
    harness.await_folder()
    assert harness.disk_state == "ok"
    harness.close()
    again = StorageHarness(FakeEngine(), load(path))
    assert again.ask([*tokens, 7]).finished.cache.tier == "disk"
    assert again.entries.by_name(again.namespace(), ("session_id", "mine"))
    again.close()


def test_an_entry_deleted_while_the_folder_is_loaded_is_gone_when_the_flush_is_reported(
    folder: tuple[Path, str, list[int]], gate: Gate
) -> None:
    path, key, _ = folder
    harness = SlowlyOpened(FakeEngine(), load(path))
    until(harness, lambda: bool(harness.entries.of(None)))
    gate.open()  # the answer waits for all of it
    answer = harness.administer(DeleteEntry(key))
    assert isinstance(answer, Removed)
    assert answer.durable
    assert not list((harness.tier.folder.path / "blocks").iterdir())
    harness.close()
    again = StorageHarness(FakeEngine(), load(path))
    assert not len(again.store)
    assert not again.entries.of(None)
    again.close()


def test_a_pin_made_while_the_folder_is_loaded_is_kept(
    folder: tuple[Path, str, list[int]], gate: Gate
) -> None:
    path, key, _ = folder
    harness = SlowlyOpened(FakeEngine(), load(path))
    until(harness, lambda: bool(harness.entries.of(None)))
    gate.open()
    answer = harness.administer(PinEntry(key, pinned=True))
    assert isinstance(answer, EntryInfo)
    assert answer.durable
    assert answer.stored_tokens
    harness.close()


def test_a_name_given_while_the_folder_is_loaded_is_kept(
    folder: tuple[Path, str, list[int]], gate: Gate
) -> None:
    path, _, _ = folder
    harness = SlowlyOpened(FakeEngine(), load(path))
    new = harness.ask([5, 6, 7], names=Names(session_id="mine", return_cache_key=True))
    gate.open()
    harness.await_folder()
    found = harness.entries.by_name(harness.namespace(), ("session_id", "mine"))
    assert found is not None
    assert found.key == new.finished.cache.new_cache_key
    harness.close()


def test_a_runtime_can_stop_while_its_folder_is_loaded(
    folder: tuple[Path, str, list[int]], gate: Gate
) -> None:
    path, key, tokens = folder
    harness = SlowlyOpened(FakeEngine(), load(path))
    until(harness, lambda: bool(harness.entries.of(None)))
    gate.open(2)
    ending = threading.Thread(target=harness.close)
    ending.start()
    gate.open()
    ending.join()
    again = StorageHarness(FakeEngine(), load(path))
    assert again.ask([*tokens, 7], names=Names(cache_key=key)).finished.cache.tier == "disk"
    again.close()


def test_an_opened_folder_that_is_never_attached_is_closed(tmp_path: Path) -> None:
    """A runtime that stops immediately never handles the event."""
    opened, events = threading.Event(), list[TierEvent]()

    def on_event(event: TierEvent) -> None:
        events.append(event)
        if isinstance(event, BlocksFound) and event.is_all:
            opened.set()

    def open_one() -> Folder:
        return open_folder(tmp_path, b"model", limit_bytes=1 << 20)

    tier = DiskTier(open_one, on_event)
    assert opened.wait(30)
    tier.close()
    open_one().close()
