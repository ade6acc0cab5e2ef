"""Tests that fetches keep their memory budget."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

from rekindle.kvcache import codec, fetches
from rekindle.kvcache.block import Block, WriteBack, chain_key
from rekindle.kvcache.disk.folder import open_folder
from rekindle.kvcache.store import Store
from rekindle.kvcache.tiers.base import Fetch, TierEvent
from rekindle.kvcache.tiers.disk import DiskTier
from rekindle.kvcache.tiers.ram import RamTier
from rekindle.tokens import Tokens

ROOT = b"r" * 32
BLOCKS, BLOCK_TOKENS = 12, 4
STATE = bytes(range(256)) * 16
LIMIT_BLOCKS = 4
PATIENCE_S = 30.0
PATH = Tokens.of(range(BLOCKS * BLOCK_TOKENS))


class Shelf:
    """Blocks on a disk with four readers, and the memory of the blocks that were read."""

    def __init__(self, folder: Path, fetch_bytes: int) -> None:
        self._held: list[tuple[weakref.ref[Any], int]] = []
        self._events: SimpleQueue[TierEvent] = SimpleQueue()
        opened = open_folder(folder, b"model", limit_bytes=1 << 30)
        self.disk = DiskTier(opened, self._events.put, allocate=self._allocate, readers=4)
        self.store = Store(
            block_tokens=BLOCK_TOKENS, tiers=[RamTier(0), self.disk], fetch_bytes=fetch_bytes
        )
        self.store.load()

    def _allocate(self, size_bytes: int) -> memoryview:
        memory = np.empty(size_bytes, np.uint8)
        self._held.append((weakref.ref(memory), size_bytes))
        return memory.data

    @property
    def held_bytes(self) -> int:
        return sum(size_bytes for memory, size_bytes in self._held if memory() is not None)

    def write(self) -> None:
        parent = ROOT
        for start in range(0, len(PATH), BLOCK_TOKENS):
            tokens = PATH[start : start + BLOCK_TOKENS]
            soon = WriteBack.SOON
            assert self.store.put(ROOT, parent, tokens, STATE, exact=False, write_back=soon)
            parent = chain_key(parent, tokens)
            done: list[bool] = []
            self.disk.flush(done.append)
            while not done:
                self.take_in()

    def take_in(self) -> None:
        self.store.on_event(self._events.get(timeout=PATIENCE_S))

    def start(self, blocks: tuple[Block, ...]) -> list[Fetch]:
        """Start windows while there is room."""
        windows: list[Fetch] = []
        while window := self.store.fetches.start(blocks):
            windows.append(window)
            blocks = blocks[len(window.blocks) :]
        return windows


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shelf]:
    """Makes blocks large: each has many stripes, and a window holds one block."""
    monkeypatch.setattr(codec, "STRIPE_BYTES", 64)
    monkeypatch.setattr(codec, "MIN_STRIPED_BYTES", 1024)
    monkeypatch.setattr(fetches, "WINDOW_BYTES", len(STATE) // 2)
    monkeypatch.setattr("rekindle.kvcache.tiers.disk.READER_BYTES", 256)
    made = Shelf(tmp_path, LIMIT_BLOCKS * len(STATE))
    made.write()
    yield made
    made.disk.close()


def test_large_blocks_are_read_concurrently_and_each_is_reported(
    shelf: Shelf,
) -> None:
    blocks = shelf.store.match(ROOT, PATH).blocks
    assert len(blocks) == BLOCKS
    windows = shelf.start(blocks)
    assert [len(window.blocks) for window in windows] == [1] * LIMIT_BLOCKS
    while not all(window.is_done for window in windows):
        shelf.take_in()
    for window, block in zip(windows, blocks, strict=False):
        assert bytes(window.blob(block) or b"") == STATE


def test_reads_never_exceed_their_memory_budget(shelf: Shelf) -> None:
    limit_bytes = shelf.store.fetches.limit_bytes
    blocks = shelf.store.match(ROOT, PATH).blocks
    windows = shelf.start(blocks)
    restored = 0
    while restored < BLOCKS:
        shelf.take_in()
        assert shelf.held_bytes <= shelf.store.fetches.used_bytes <= limit_bytes
        while windows and windows[0].is_done:
            window = windows.pop(0)
            assert bytes(window.blob(blocks[restored]) or b"") == STATE
            restored += 1
            shelf.store.fetches.release(window)
            windows += shelf.start(blocks[restored + len(windows) :])
    assert shelf.held_bytes == shelf.store.fetches.used_bytes == 0


def test_nobody_reads_ahead_while_a_turn_waits_for_memory(shelf: Shelf) -> None:
    blocks = shelf.store.match(ROOT, PATH).blocks
    held = shelf.start(blocks[:LIMIT_BLOCKS])
    assert shelf.store.fetches.start(blocks[8:]) is None  # another turn has to wait
    while not held[0].is_done:
        shelf.take_in()
    shelf.store.fetches.release(held[0])
    assert shelf.store.fetches.read_ahead(blocks[LIMIT_BLOCKS:]) is None
    waited = shelf.store.fetches.start(blocks[8:])
    assert waited is not None
    while not held[1].is_done:
        shelf.take_in()
    shelf.store.fetches.release(held[1])
    ahead = shelf.store.fetches.read_ahead(blocks[LIMIT_BLOCKS:])
    assert ahead is not None
    for window in (*held[2:], waited, ahead):
        shelf.store.fetches.release(window)
    while shelf.store.fetches.used_bytes:
        shelf.take_in()


def test_released_windows_free_their_memory(shelf: Shelf) -> None:
    for window in shelf.start(shelf.store.match(ROOT, PATH).blocks):
        shelf.store.fetches.release(window)
    while shelf.store.fetches.used_bytes:
        shelf.take_in()
    assert shelf.held_bytes == 0


def test_small_blocks_share_a_window(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetches, "WINDOW_BYTES", 1 << 20)
    monkeypatch.setattr(fetches, "WINDOWS", 2)
    windows = shelf.start(shelf.store.match(ROOT, PATH).blocks)
    assert [len(window.blocks) for window in windows] == [2, 2]
    while not all(window.is_done for window in windows):
        shelf.take_in()
