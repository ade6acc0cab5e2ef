"""Tests blocks with a checkpoint: budgets, pins, deletion and a failing disk."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Empty, SimpleQueue

import pytest

from rekindle.kvcache.block import Block, PrefixHandle, WriteBack, chain_key
from rekindle.kvcache.codec import Record
from rekindle.kvcache.disk.folder import open_folder
from rekindle.kvcache.store import Store
from rekindle.kvcache.tiers.base import TierEvent
from rekindle.kvcache.tiers.disk import DiskTier
from rekindle.kvcache.tiers.ram import OVERHEAD_BYTES, RamTier
from rekindle.tokens import Tokens, pack

from .naive import ROOT, Ids, ends, last_block

BLOCK_TOKENS = 4
CELL_BYTES, CHECKPOINT_BYTES = 100, 20_000
PLENTY_BYTES = 1 << 30
LEAST_DISK_BYTES = 1 << 20  # what an empty index takes of it
PATIENCE_S = 20.0
SOON = WriteBack.SOON

LONG: Ids = tuple(range(12))


def state_of(path: Ids, *, resumable: bool) -> bytes:
    own = last_block(path, BLOCK_TOKENS)
    cells = b"".join(pack([token]).ljust(CELL_BYTES, b".") for token in own)
    return cells + (pack(path).ljust(CHECKPOINT_BYTES, b"!") if resumable else b"")


class DiskStore:
    """A store with RAM and a disk."""

    def __init__(
        self, folder: Path, *, ram_bytes: int = PLENTY_BYTES, disk_bytes: int = PLENTY_BYTES
    ) -> None:
        self.folder = folder
        self.events: SimpleQueue[TierEvent] = SimpleQueue()
        opened = open_folder(folder, b"model", limit_bytes=disk_bytes)
        self.disk = DiskTier(opened, self.events.put)
        self.store = Store(block_tokens=BLOCK_TOKENS, tiers=[RamTier(ram_bytes), self.disk])
        self.store.load()

    def put(
        self,
        path: Ids,
        *,
        resumable: bool = False,
        exact: bool = False,
        write_back: WriteBack = SOON,
    ) -> bool:
        """Put a conversation block by block, the last one with or without a checkpoint."""
        parent, kept = ROOT, True
        for end in ends(path, BLOCK_TOKENS):
            packed = Tokens.of(last_block(end, BLOCK_TOKENS))
            last = resumable and end == path
            if self.store.wants(parent, packed, exact=exact, resumable=last):
                state = state_of(end, resumable=last)
                kept = self.store.put(
                    ROOT, parent, packed, state, exact=exact, resumable=last, write_back=write_back
                )
            parent = chain_key(parent, packed)
        return kept

    def attach(self, path: Ids, *, pinned: bool = False) -> PrefixHandle:
        handle = PrefixHandle(ROOT, Tokens.of(path), pinned=pinned)
        self.store.conversations.attach(handle)
        return handle

    def resumes(self, path: Ids) -> list[int]:
        return [block.stop for block in self.store.checkpoints(ROOT, Tokens.of(path))]

    def block(self, path: Ids) -> Block:
        key = ROOT
        for end in ends(path, BLOCK_TOKENS):
            key = chain_key(key, Tokens.of(last_block(end, BLOCK_TOKENS)))
        return next(block for block in self.store if block.key == key)

    def take_in(self, *, wait: bool = False) -> None:
        with suppress(Empty):
            while True:
                self.store.on_event(
                    self.events.get(timeout=PATIENCE_S) if wait else self.events.get_nowait()
                )
                wait = False

    def flush(self) -> None:
        done: list[bool] = []
        self.disk.flush(done.append)
        while not done:
            self.take_in(wait=True)

    @contextmanager
    def failing(self, code: int) -> Iterator[None]:
        """Writes fail in the meantime."""

        def fail(records: Iterable[Record]) -> None:
            raise OSError(code, "no")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.disk.folder.block_files, "write", fail)
            yield
            self.flush()

    def fetch(self, path: Ids) -> list[bytes]:
        """What a turn would read of these blocks from the disk."""
        blocks = self.store.match(ROOT, Tokens.of(path)).blocks
        fetch = self.store.fetches.start(blocks)
        while fetch is not None and not fetch.is_done:
            self.take_in(wait=True)
        return [bytes(blob) for block in blocks if (blob := self.store.get(block)) is not None]

    def copied_bytes(self) -> int:
        """The bytes of the copies on disk, counted one by one."""
        on_disk = (block for block in self.store if self.disk.holds(block))
        return sum(block.copies[self.disk.name].size_bytes for block in on_disk)

    def reopened(self) -> DiskStore:
        self.flush()
        self.disk.close()
        return DiskStore(self.folder)


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[DiskStore]:
    cache = DiskStore(tmp_path)
    yield cache
    cache.disk.close()


# -- budgets ---------------------------------------------------------------------------------------


def test_adding_a_checkpoint_to_a_block_on_disk_keeps_the_ram_budget(
    tmp_path: Path,
) -> None:
    """RAM would evict the block itself to make room for its checkpoint."""
    room = CHECKPOINT_BYTES + 2 * BLOCK_TOKENS * CELL_BYTES + 2 * OVERHEAD_BYTES
    for spare in range(0, room, 97):
        cache = DiskStore(tmp_path / str(spare), ram_bytes=room + 500 - spare)
        cache.put(LONG[:4])
        cache.put((9, 9, 9, 9))
        cache.flush()
        cache.put(LONG[:4], resumable=True)
        assert cache.store.tiers[0].budget.used_bytes <= cache.store.tiers[0].budget.limit_bytes
        cache.disk.close()


def test_checkpoints_keep_the_disk_budget(tmp_path: Path) -> None:
    """A checkpoint for a block on disk makes room like any other state, or is refused."""
    cache = DiskStore(tmp_path, disk_bytes=LEAST_DISK_BYTES + 200_000)
    paths = [(first, 1, 2, 3) for first in range(20)]
    for path in paths:
        cache.put(path)
    cache.flush()
    for path in paths:
        cache.put(path, resumable=True)
        assert cache.disk.budget.used_bytes <= cache.disk.budget.limit_bytes
    cache.flush()
    assert cache.disk.budget.used_bytes == cache.copied_bytes()
    cache.disk.close()


# -- pins and deletion -----------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["checkpoint", "longer"])
@pytest.mark.parametrize("end", [6, 8])
@pytest.mark.parametrize("behind", [0, 1])
def test_a_pin_keeps_a_checkpoint_next_to_longer_blocks(
    tmp_path: Path, first: str, end: int, behind: int
) -> None:
    """Other conversations continue a pinned one, and its checkpoint must stay. The checkpoint of
    a reply is one token before its end."""
    room = 3 * CHECKPOINT_BYTES
    cache = DiskStore(tmp_path, ram_bytes=room)
    if first == "longer":
        cache.put(LONG, resumable=True, write_back=WriteBack.NEVER)
    handle = cache.attach(LONG[:end], pinned=True)
    cache.put(LONG[: end - behind], resumable=True, write_back=WriteBack.NEVER)
    if first == "checkpoint":
        cache.put(LONG, resumable=True, write_back=WriteBack.NEVER)
    for other in range(20, 40):
        cache.put((other, 1, 2, 3), resumable=True, write_back=WriteBack.NEVER)
    assert handle.block is cache.block(LONG[: end - behind])
    assert end - behind in cache.resumes(LONG)
    cache.disk.close()


def test_deleting_a_conversation_removes_its_checkpoints(cache: DiskStore) -> None:
    """Checkpoints of a shared prefix stay."""
    other = (*LONG[:4], 90, 91, 92, 93)
    cache.put(LONG[:6], resumable=True)
    cache.put(LONG[:7], resumable=True)
    cache.put(LONG[:3], resumable=True)
    cache.put(LONG[:4], resumable=True)
    cache.put(LONG, resumable=True)
    cache.put(other, resumable=True)
    handle = cache.attach(LONG)
    cache.attach(other)
    cache.store.conversations.release(handle)
    assert {block.stop for block in cache.store} == {3, 4, 8}
    assert cache.resumes(LONG) == [4, 3]
    assert cache.resumes(other) == [8, 4, 3]


def test_deleting_the_only_conversation_leaves_nothing(cache: DiskStore) -> None:
    for stop in (2, 3, 6, 7, 12):
        cache.put(LONG[:stop], resumable=True)
    handle = cache.attach(LONG[:11])
    cache.store.conversations.release(handle)
    assert not len(cache.store)


@pytest.mark.parametrize("is_loading", [False, True])
def test_a_block_that_loses_its_last_user_is_kept_while_conversations_are_being_loaded(
    cache: DiskStore, is_loading: bool
) -> None:
    """The conversation that needs it may be attached after all blocks are loaded."""
    conversations = cache.store.conversations
    if is_loading:
        conversations.begin_loading()
    cache.put(LONG[:4])
    turn = cache.attach(LONG[:2])
    cache.put(LONG[:2], resumable=True)  # the turn ends here now
    assert turn.block is not None
    assert turn.block.stop == 2
    assert {block.stop for block in cache.store} == ({2, 4} if is_loading else {2})
    if is_loading:
        loaded = cache.attach(LONG[:4])
        conversations.end_loading()
        assert {block.stop for block in cache.store} == {2, 4}
        conversations.release(loaded)
        assert {block.stop for block in cache.store} == {2}


# -- the disk --------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("exact", [False, True])
def test_a_checkpoint_that_cannot_be_written_loses_no_stored_state(
    cache: DiskStore, code: int, exact: bool
) -> None:
    """The block's old file stays valid, and so do its descendants."""
    handle = cache.attach(LONG, pinned=True)
    cache.put(LONG)
    cache.store.write_back.write_everything()
    cache.flush()
    with cache.failing(code):
        cache.put(LONG[:4], resumable=True, exact=exact)
    assert handle.block is cache.block(LONG)
    assert all(block.stored for block in cache.store)
    assert cache.disk.budget.used_bytes == cache.copied_bytes()
    again = cache.reopened()
    assert again.fetch(LONG) == [state_of(end, resumable=False) for end in ends(LONG, 4)]
    again.disk.close()


def test_ram_drops_a_checkpoint_whose_write_failed(
    cache: DiskStore,
) -> None:
    cache.put(LONG)
    cache.store.write_back.write_everything()
    cache.flush()
    with cache.failing(errno.EIO):
        cache.put(LONG[:4], resumable=True)
    block = cache.block(LONG[:4])
    held = cache.store.get(block)
    assert held is not None
    assert bytes(held) == state_of(LONG[:4], resumable=block.resumable)
    assert block.size_bytes == len(held)


def test_a_block_that_gets_a_checkpoint_during_a_read_is_not_reported_as_corrupt(
    tmp_path: Path,
) -> None:
    cache = DiskStore(tmp_path)
    cache.put(LONG)
    cache = cache.reopened()
    blocks = cache.store.match(ROOT, Tokens.of(LONG)).blocks
    with pytest.MonkeyPatch.context() as patch:
        read = cache.disk.folder.block_files.read
        order: list[tuple[bytes, int]] = []

        class Later:
            def __init__(self, key: bytes, size_bytes: int, _allocate: object) -> None:
                order.append((key, size_bytes))

            def take_part(self, _is_wanted: object) -> bool:
                return True

            def record(self) -> Record:
                raise OSError(errno.EMFILE, "no handles")

        patch.setattr(cache.disk.folder.block_files, "reading", Later)
        fetch = cache.store.fetches.start(blocks)
        assert fetch is not None
        event = cache.events.get(timeout=PATIENCE_S)
    before = {key: read(key, size) for key, size in order}
    cache.put(LONG[:4], resumable=True)
    cache.flush()
    for key, size in order:  # what the readers find that come before the rename, and after it
        try:
            read(key, size)
            fetch.records[key] = before[key]
        except Exception as error:
            fetch.bad[key] = str(error)
    assert fetch.bad
    cache.store.on_event(event)
    assert not fetch.bad
    assert cache.disk.counts.corrupt_blocks == 0
    assert len(cache.store) == 3
    fetch.records[blocks[0].key] = before[blocks[0].key]  # it was read just before
    fetch.is_done = False
    cache.store.on_event(event)
    assert blocks[0].key not in fetch.records
    assert len(cache.store) == 3
    cache.disk.close()
