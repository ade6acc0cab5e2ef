"""The disk tier: stores blocks as files. One thread writes behind the turns, others read."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import count

from rekindle.errors import CorruptBlock
from rekindle.kvcache.block import Block, BlockKind
from rekindle.kvcache.codec import Record, record_bytes
from rekindle.kvcache.disk.block_files import BlockReading
from rekindle.kvcache.disk.entry_table import Change
from rekindle.kvcache.disk.folder import Folder
from rekindle.kvcache.disk.opening import Opening, stored_blocks
from rekindle.kvcache.disk.policy_state import PolicyState
from rekindle.kvcache.disk.writer import BackUp, Commit, Remove, Writer
from rekindle.kvcache.tiers.base import (
    Fetch,
    Fetched,
    Flushed,
    OnEvent,
    StoredBlock,
    Tier,
    Write,
    WriteFailed,
    Written,
)
from rekindle.memory import Allocate, Buffer, plain_memory
from rekindle.protocol.settings import EvictionPolicy
from rekindle.tokens import Tokens

log = logging.getLogger("rekindle.cache")

NAME = "disk"
READER_BYTES = 8 << 20  # one more thread reads a block for each of these
LAST_READS_S = 5.0  # time for running reads to end when the tier is closed
COPIES = 2  # of the index: the current one and its backup
MIN_INDEX_BYTES = 1 << 20  # of the budget, for an empty index, its log and its backup


class WriteBehindTier(Tier):
    """Counts a block when it is put and writes it later. Until then its bytes stay in memory, where
    they can be read and replaced."""

    def __init__(
        self,
        name: str,
        limit_bytes: int,
        queue_bytes: int,
        eviction: EvictionPolicy = "hit-density",
    ) -> None:
        super().__init__(name, limit_bytes, persistent=True, eviction=eviction)
        self.queue_bytes = queue_bytes
        self._pending: dict[bytes, Write] = {}

    @abstractmethod
    def _write(self, write: Write) -> None:
        """Start writing a block. `Written` or `WriteFailed` follows."""

    @abstractmethod
    def _delete(self, key: bytes, *, quarantine: bool) -> None:
        """Delete a block after every earlier order."""

    @property
    def has_queue_room(self) -> bool:
        return self.pending_bytes < self.queue_bytes

    def adopt(self, block: Block, kind: BlockKind) -> None:
        self.budget.add(block, self.cost(block.tokens, kind.size_bytes), kind)

    def get(self, block: Block) -> Buffer | None:
        """The bytes of a block whose write is pending."""
        write = self._pending.get(block.key)
        return write.record.blob if write else None

    def put(self, block: Block, blob: Buffer) -> None:
        """Queue a block to be written. Until then its current copy stays valid."""
        assert block.parent is not None
        cost = self.cost(block.tokens, len(blob))
        if self.holds(block):
            self.budget.resize(block, cost)
        else:
            self.budget.add(block, cost, None)
        record = Record(
            block.namespace, block.parent.key, block.tokens, blob, block.exact, block.resumable
        )
        self._forget_pending(block.key)
        size_bytes = record_bytes(len(block.tokens.packed), len(blob))
        write = self._pending[block.key] = Write(block.key, record, size_bytes)
        self.pending_bytes += len(blob)
        self._write(write)

    def remove(self, block: Block, *, quarantine: bool = False) -> None:
        if self.budget.remove(block):
            self._forget_pending(block.key)
            self._delete(block.key, quarantine=quarantine)

    def discard(self, key: bytes) -> None:
        self._delete(key, quarantine=False)

    def resize(self, block: Block, kind: BlockKind) -> None:
        self.budget.resize(block, self.cost(block.tokens, kind.size_bytes))

    def complete(self, event: Written | WriteFailed) -> list[Write]:
        done = [write for write in event.writes if self._pending.get(write.key) is write]
        for write in done:
            self._forget_pending(write.key)
        if isinstance(event, Written):
            self.counts.written_bytes += sum(write.size_bytes for write in event.writes)
        return done

    def _forget_pending(self, key: bytes) -> None:
        if write := self._pending.pop(key, None):
            self.pending_bytes -= len(write.record.blob)


class DiskTier(WriteBehindTier):
    """Called from the engine's thread only.

    With a folder it is open immediately. With a function that opens one, it opens in the
    background: `attach` follows the event `TierOpened`, and `begin` follows when all blocks have
    been loaded. Until then nothing is written, and changes of entries wait.
    """

    def __init__(
        self,
        folder: Folder | Callable[[], Folder],
        on_event: OnEvent,
        *,
        floor_bytes: int = 0,
        queue_bytes: int = 128 << 20,
        entries_bytes: int = 0,  # of the index
        eviction: EvictionPolicy = "hit-density",
        allocate: Allocate = plain_memory,  # the memory that blocks are read into
        readers: int = 2,
    ) -> None:
        super().__init__(NAME, 0, queue_bytes, eviction)
        self._allocate = allocate
        self._on_event = on_event
        self._floor_bytes = floor_bytes
        self._writer = Writer(NAME, on_event, floor_bytes)
        self._readers = ThreadPoolExecutor(readers, "disk-reader")
        self._max_readers = readers
        self._reads: set[Future[None]] = set()  # running
        self._flushes: list[Flushed | Commit] = []  # requested before it was open
        self._folder: Folder | None = None
        self.opening: Opening | None = None
        if isinstance(folder, Folder):
            self.attach(folder, entries_bytes)
            self.begin()
        else:
            self.is_open = False
            self.opening = Opening(NAME, folder, on_event)

    @property
    def folder(self) -> Folder:
        assert self._folder is not None, "the folder is not open yet"
        return self._folder

    @property
    def capacity_bytes(self) -> int:
        """The budget, or the space of the disk above the floor if that is less."""
        limit_bytes = self.budget.limit_bytes
        if not self.is_open:
            return limit_bytes
        left_bytes = max(self.folder.block_files.free_bytes() - self._floor_bytes, 0)
        return min(limit_bytes, self.budget.used_bytes + left_bytes)

    def attach(self, folder: Folder, entries_bytes: int, other_bytes: int = 0) -> None:
        """Use this folder. `other_bytes` of its limit are reserved for other files."""
        index_bytes = MIN_INDEX_BYTES + COPIES * entries_bytes
        reserved_bytes = index_bytes + folder.block_files.max_quarantine_bytes + other_bytes
        self.budget.limit_bytes = max(folder.limit_bytes - reserved_bytes, 0)
        self._folder = folder

    def begin(self) -> None:
        """Start the writer, after all blocks of the folder have been loaded."""
        self.is_open = True
        self._writer.start(self.folder)
        flushes, self._flushes = self._flushes, []
        for flush in flushes:
            self._writer.put(flush)

    def stored(self) -> Iterator[StoredBlock]:
        return stored_blocks(self.folder.take_listed()[0]) if self.is_open else iter(())

    def cost(self, tokens: Tokens, state_bytes: int) -> int:
        """What a block takes of the disk: its file in 4 KiB pages, and its row in the index."""
        packed_bytes = len(tokens.packed)
        size = record_bytes(packed_bytes, state_bytes)
        return -(-size // 4096) * 4096 + COPIES * (256 + packed_bytes)

    def _write(self, write: Write) -> None:
        self._writer.put(write)

    def _delete(self, key: bytes, *, quarantine: bool) -> None:
        self._writer.put(Remove(key, quarantine))

    def journal(self, change: Change) -> None:
        """Queue a change of entries or names for the index."""
        self._writer.note(change)

    def give_way(self, busy: bool) -> None:
        """Write little while turns are being computed."""
        self._writer.give_way(busy)

    @property
    def lacks_backup(self) -> bool:
        """Whether a deletion has removed the backup of the index."""
        return self.is_open and self.folder.index_db.lacks_backup

    def back_up(self, state: PolicyState) -> None:
        """Back up the index, and save what eviction has learned."""
        if self.is_open:
            self._writer.put(BackUp(state))

    def flush(self, then: Callable[[bool], None]) -> None:
        self._order(Flushed(then))

    def commit(self, row: str, then: Callable[[bool], None]) -> None:
        """Report `Flushed` when the index has the latest change of an entry's row, or has failed to
        take it. Does not wait for state."""
        self._order(Commit(row, then))

    def _order(self, order: Flushed | Commit) -> None:
        if self.is_open:
            self._writer.put(order)
        elif self._folder is not None:
            self._flushes.append(order)  # blocks to remove may not have been loaded yet
        else:
            order.then(False)

    def retry(self) -> None:
        super().retry()
        self._writer.retry()

    def read(self, blocks: Sequence[Block], fetch: Fetch) -> None:
        """Read blocks in order, so that the first is complete first. All readers share the work on
        a large block."""
        done = count(1)  # its `next` is atomic
        for block in blocks:
            kind = block.copies[self.name].written or block.kind
            size = record_bytes(len(block.tokens.packed), kind.size_bytes)
            reading = self.folder.block_files.reading(block.key, size, self._allocate)
            for _ in range(min(self._max_readers, max(size // READER_BYTES, 1))):
                read = self._readers.submit(self._read_part, fetch, done, block.key, reading)
                self._reads.add(read)
                read.add_done_callback(self._reads.discard)

    def _read_part(
        self, fetch: Fetch, done: Iterator[int], key: bytes, reading: BlockReading
    ) -> None:
        if not reading.take_part(lambda: not fetch.is_released):
            return
        try:
            record = reading.record()
            if record is not None:
                fetch.records[key] = record
        except CorruptBlock as error:
            fetch.bad[key] = str(error)
        except Exception:  # no handles or no memory: a plain miss, because a turn waits
            log.exception("reading a block failed")
        if next(done) == len(fetch.blocks):
            self._on_event(Fetched(fetch))

    def close(self) -> None:
        """Finish queued writes, then close the folder."""
        if self.opening is not None:
            self.opening.close()
            self._folder = self._folder or self.opening.folder
        if self._folder is None:
            return
        if not self.is_open:
            self.begin()
        self._writer.close()
        self._readers.shutdown(wait=False, cancel_futures=True)
        wait(list(self._reads), LAST_READS_S)  # one may hang forever
        self.folder.close()
