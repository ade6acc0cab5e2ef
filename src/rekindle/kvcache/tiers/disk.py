"""The disk tier: blocks as files, written behind by one thread and read by others."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from rekindle.errors import CorruptBlock
from rekindle.kvcache.block import Block, BlockKind
from rekindle.kvcache.codec import Record, record_bytes
from rekindle.kvcache.disk.block_files import MOST_QUARANTINE_BYTES, BlockReading
from rekindle.kvcache.disk.folder import Folder
from rekindle.kvcache.disk.index_db import Change
from rekindle.kvcache.disk.opening import Opening, stored_blocks
from rekindle.kvcache.disk.policy_state import PolicyState
from rekindle.kvcache.disk.writer import BackUp, Commit, Remove, SavePolicyState, Writer
from rekindle.kvcache.tiers.base import (
    BaseTier,
    Blob,
    Fetch,
    Fetched,
    Flushed,
    OnEvent,
    StoredBlock,
    Write,
    WriteFailed,
    Written,
)
from rekindle.memory import Allocate, plain_memory
from rekindle.protocol.settings import EvictionPolicy
from rekindle.tokens import Tokens

# ----------------------------------------------------------------------
# A tier that writes behind: a block counts when it is put and is written later, by others.


class WriteBehindTier(BaseTier, ABC):
    """Holds what is not yet written, so that it can be had and overtaken until it is."""

    def __init__(
        self,
        name: str,
        limit_bytes: int,
        queue_bytes: int,
        eviction: EvictionPolicy = "hit-density",
    ) -> None:
        super().__init__(name, limit_bytes, persistent=True, eviction=eviction)
        self.queue_bytes = queue_bytes
        self._pending: dict[bytes, Write] = {}  # asked for, not yet done

    @abstractmethod
    def cost(self, tokens: Tokens, state_bytes: int) -> int: ...

    @abstractmethod
    def _write(self, write: Write) -> None:
        """Have a block written; `Written` or `WriteFailed` follows."""

    @abstractmethod
    def _delete(self, key: bytes, *, quarantine: bool) -> None:
        """Have a block deleted, after what was asked for before."""

    @property
    def has_queue_room(self) -> bool:
        return self.pending_bytes < self.queue_bytes

    def adopt(self, block: Block, kind: BlockKind) -> None:
        self.budget.enter(block, self.cost(block.tokens, kind.size_bytes), kind)

    def get(self, block: Block) -> Blob | None:
        """The bytes of a block that is still waiting to be written."""
        write = self._pending.get(block.key)
        return write.record.blob if write else None

    def put(self, block: Block, blob: Blob) -> None:
        """Have a block written; until then the copy that is there stands."""
        assert block.parent is not None
        cost = self.cost(block.tokens, len(blob))
        if self.holds(block):
            self.budget.resize(block, cost)
        else:
            self.budget.enter(block, cost, None)
        record = Record(
            block.namespace, block.parent.key, block.tokens, blob, block.exact, block.resumable
        )
        self._forget_pending(block.key)
        size_bytes = record_bytes(len(block.tokens.packed), len(blob))
        write = self._pending[block.key] = Write(block.key, record, size_bytes)
        self.pending_bytes += len(blob)
        self._write(write)

    def remove(self, block: Block, *, quarantine: bool = False) -> None:
        if self.budget.leave(block):
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


log = logging.getLogger("rekindle.cache")

NAME = "disk"
READERS = 2  # unless there are cores for more
READER_BYTES = 8 << 20  # of a block that are worth another reader
LAST_READS_S = 5.0  # for reads in progress to end when the tier is closed
PAGE_BYTES = 4096  # what a file system counts in
ROW_BYTES = 256  # a block's row in the index, beside its tokens
COPIES = 2  # of the index: one in use, one for the day it is damaged
LEAST_INDEX_BYTES = 1 << 20  # of the budget, for an empty index, its log and its copy


class DiskTier(WriteBehindTier):
    """Called by the engine's thread only, but for what the writer and the readers do inside.

    Given a folder it is open at once. Given how to have one it opens beside the turns: `attach`
    when that is `Opened`, `begin` when all in it is taken in. Until then nothing is written, and
    changes of entries wait.
    """

    def __init__(
        self,
        folder: Folder | Callable[[], Folder],
        on_event: OnEvent,
        *,
        floor_bytes: int = 0,
        queue_bytes: int = 128 << 20,
        entries_bytes: int = 0,  # what entries may take of the index
        eviction: EvictionPolicy = "hit-density",
        allocate: Allocate = plain_memory,  # what blocks are read into
        readers: int = READERS,
    ) -> None:
        super().__init__(NAME, 0, queue_bytes, eviction)
        self._allocate = allocate
        self._on_event = on_event
        self._writer = Writer(NAME, on_event, floor_bytes)
        self._readers = ThreadPoolExecutor(readers, "disk-reader")
        self._most_readers = readers  # of one block
        self._reads: set[Future[None]] = set()  # that have not ended
        self._flushes: list[Flushed] = []  # asked for before it was open
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
        assert self._folder is not None, "it is not there yet"
        return self._folder

    # -- beginning -----------------------------------------------------------------------------

    def attach(self, folder: Folder, entries_bytes: int, other_bytes: int = 0) -> None:
        """This is its folder; what is in it is reported next. `other_bytes` of it are others'."""
        files = folder.block_files
        files.most_quarantine_bytes = min(MOST_QUARANTINE_BYTES, folder.limit_bytes // 16)
        index_bytes = LEAST_INDEX_BYTES + COPIES * entries_bytes
        reserved_bytes = index_bytes + files.most_quarantine_bytes + other_bytes
        self.budget.limit_bytes = max(folder.limit_bytes - reserved_bytes, 0)
        self._folder = folder

    def begin(self) -> None:
        """All that the folder held is taken in: from here on the writer uses the index."""
        self.is_open = True
        self._writer.start(self.folder)
        flushes, self._flushes = self._flushes, []
        for flush in flushes:
            self._writer.put(flush)

    def stored(self) -> Iterator[StoredBlock]:
        return stored_blocks(self.folder.take_listed()[0]) if self.is_open else iter(())

    def cost(self, tokens: Tokens, state_bytes: int) -> int:
        """What a block takes of the disk: its file in whole pages, and its row."""
        packed_bytes = len(tokens.packed)
        size = record_bytes(packed_bytes, state_bytes)
        return -(-size // PAGE_BYTES) * PAGE_BYTES + COPIES * (ROW_BYTES + packed_bytes)

    # -- writing -------------------------------------------------------------------------------

    def _write(self, write: Write) -> None:
        self._writer.put(write)

    def _delete(self, key: bytes, *, quarantine: bool) -> None:
        self._writer.put(Remove(key, quarantine))

    def journal(self, change: Change) -> None:
        """Have a change of entries or names written to the index."""
        self._writer.note(change)

    def give_way(self, busy: bool) -> None:
        """Write little while turns are computed."""
        self._writer.give_way(busy)

    def back_up(self) -> None:
        if self.is_open:
            self._writer.put(BackUp())

    def save_policy_state(self, state: PolicyState) -> None:
        """Save what eviction has learned, for the next process."""
        if self.is_open:
            self._writer.put(SavePolicyState(state))

    def flush(self, then: Callable[[bool], None]) -> None:
        if self.is_open:
            self._writer.put(Flushed(then))
        elif self._folder is not None:
            self._flushes.append(Flushed(then))  # what there is to remove may not be found yet
        else:
            then(False)

    def commit(self, then: Callable[[bool], None]) -> None:
        """Have `Flushed` reported when the index has what was noted before, or has failed to take
        it; it does not wait for state."""
        if self.is_open:
            self._writer.put(Commit(then))
        else:
            then(False)

    def retry(self) -> None:
        super().retry()
        self._writer.retry()

    # -- reading -------------------------------------------------------------------------------

    def read(self, blocks: Sequence[Block], fetch: Fetch) -> None:
        """Blocks in their order, so that the first is there soonest: all readers take part in one
        that is large, and go on with the next."""
        share = _Share(len(blocks))
        for block in blocks:
            kind = block.copies[self.name].written or block.kind
            size = record_bytes(len(block.tokens.packed), kind.size_bytes)
            reading = self.folder.block_files.reading(block.key, size, self._allocate)
            for _ in range(min(self._most_readers, max(size // READER_BYTES, 1))):
                read = self._readers.submit(self._read_on, fetch, share, block.key, reading)
                self._reads.add(read)
                read.add_done_callback(self._reads.discard)

    def _read_on(self, fetch: Fetch, share: _Share, key: bytes, reading: BlockReading) -> None:
        if not reading.take_part(lambda: not fetch.is_released):
            return
        try:
            record = reading.record()
            if record is not None:
                fetch.records[key] = record
        except CorruptBlock as error:
            fetch.bad[key] = str(error)
        except Exception:  # no handles or no memory just now: a plain miss, and a turn waits
            log.exception("reading a block failed")
        if share.is_through():
            self._on_event(Fetched(fetch))

    # -- ending --------------------------------------------------------------------------------

    def close(self) -> None:
        """Write what is queued, then let go of the folder."""
        if self.opening is not None:
            self.opening.close()
            self._folder = self._folder or self.opening.folder
        if self._folder is None:
            return
        if not self.is_open:
            self.begin()
        self._writer.close()
        self._readers.shutdown(wait=False, cancel_futures=True)
        wait(list(self._reads), LAST_READS_S)  # one may hang for ever
        self.folder.close()


class _Share:
    """How many reads of a fetch are still to be done here; any thread."""

    def __init__(self, blocks: int) -> None:
        self._left = blocks
        self._lock = threading.Lock()

    def is_through(self) -> bool:
        """Count one as done; whether it was the last."""
        with self._lock:
            self._left -= 1
            return not self._left
