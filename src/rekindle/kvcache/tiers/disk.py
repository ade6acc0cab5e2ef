"""The disk tier: blocks as files, written behind by one thread, read beside the engine by others.

The thread that owns the engine decides and counts; it never waits here. What becomes of a write or
a read is told to it through `tell`, as one of the messages below.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Container, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from rekindle.errors import CorruptBlock
from rekindle.kvcache.block import Block, Kind
from rekindle.kvcache.codec import Record, record_bytes
from rekindle.kvcache.disk.block_files import MOST_ASIDE_BYTES
from rekindle.kvcache.disk.folder import Folder
from rekindle.kvcache.disk.index_db import Change
from rekindle.kvcache.disk.writer import BackUp, Flushed, Remove, Settled, State, WriteOrder, Writer
from rekindle.kvcache.policy import Shares
from rekindle.kvcache.tiers.ram import Blob

log = logging.getLogger("rekindle.cache")

READERS = 2
PAGE_BYTES = 4096  # what a file system counts in
ROW_BYTES = 256  # a block's row in the index, beside its tokens
COPIES = 2  # of the index: one in use, one for the day it is damaged
LEAST_INDEX_BYTES = 1 << 20  # of the budget, for an empty index, its log and its copy


@dataclass(slots=True, eq=False)
class Fetch:
    """Blocks on their way up; when they were heard of, each is in one of the tables, or had bad
    luck."""

    blocks: dict[bytes, Block]  # what was asked for
    kinds: dict[bytes, Kind]  # what they were then
    wanted: int
    records: dict[bytes, Record] = field(default_factory=dict)
    bad: dict[bytes, str] = field(default_factory=dict)
    done: bool = False


@dataclass(frozen=True, slots=True)
class Fetched:
    fetch: Fetch


News = Settled | Fetched
Tell = Callable[[News], None]


def disk_bytes(packed: bytes, state_bytes: int) -> int:
    """What a block takes of the disk: its file in whole pages, and its row."""
    size = record_bytes(len(packed), state_bytes)
    return -(-size // PAGE_BYTES) * PAGE_BYTES + COPIES * (ROW_BYTES + len(packed))


@dataclass(slots=True)
class DiskCounts:
    written_bytes: int = 0
    read_bytes: int = 0
    corrupt_blocks: int = 0


class DiskTier:
    """Called by the engine's thread only, but for what the writer and the readers do inside."""

    def __init__(
        self,
        folder: Folder,
        tell: Tell,
        *,
        floor_bytes: int = 0,
        queue_bytes: int = 128 << 20,
        entries_bytes: int = 0,  # what entries may take of the index
    ) -> None:
        self.folder = folder
        folder.vault.most_aside_bytes = min(MOST_ASIDE_BYTES, folder.limit_bytes // 16)
        index_bytes = LEAST_INDEX_BYTES + COPIES * entries_bytes
        reserved_bytes = index_bytes + folder.vault.most_aside_bytes
        self.limit_bytes = max(folder.limit_bytes - reserved_bytes, 0)
        self.used_bytes = 0
        self.state: State = "ok"
        self.counts = DiskCounts()
        self._ceiling_bytes = self.limit_bytes  # lower while the file system has no more room
        self._queue_bytes = queue_bytes
        self._shares = Shares()
        self._tell = tell
        self._pending: dict[bytes, WriteOrder] = {}  # asked for, not yet settled
        self.pending_bytes = 0
        self._writer = Writer(folder, tell, floor_bytes)
        self._readers = ThreadPoolExecutor(READERS, "disk-reader")

    # -- accounting ----------------------------------------------------------------------------

    def held_bytes(self, root: bytes) -> int:
        return self._shares.held_bytes(root)

    def fits(self, cost: int) -> bool:
        return self.used_bytes + cost <= self._ceiling_bytes

    def could_fit(self, cost: int) -> bool:
        return cost <= self._ceiling_bytes

    @property
    def takes_writes(self) -> bool:
        return self.state != "failing"

    @property
    def has_queue_room(self) -> bool:
        return self.pending_bytes < self._queue_bytes

    def adopt(self, block: Block, size_bytes: int) -> None:
        """Count a block that was found on disk when the tier was opened."""
        self._enter(block, size_bytes)
        block.filed = block.kind

    def _enter(self, block: Block, size_bytes: int) -> None:
        above = block.parent
        parent = None if above is None or above.is_root else above.key
        block.disk_bytes = size_bytes
        self._shares.enter(block.root, block.key, parent, size_bytes)
        self.used_bytes += size_bytes

    def use(self, block: Block) -> None:
        self._shares.use(block.root, block.key)

    def lowest(self, spared: Container[bytes]) -> bytes | None:
        return self._shares.lowest(spared)

    # -- writing -------------------------------------------------------------------------------

    def write(self, block: Block, blob: Blob) -> None:
        """Have a block written behind; its parent is on disk or on its way there."""
        assert block.parent is not None
        cost = disk_bytes(block.packed, len(blob))
        if block.disk_bytes:  # written again, as what it is now; until then the old file stands
            self.resize(block, cost)
        else:
            self._enter(block, cost)
        record = Record(
            block.root, block.parent.key, block.packed, blob, block.exact, block.resumable
        )
        self._forget_pending(block.key)
        order = self._pending[block.key] = WriteOrder(
            block.key, record, record_bytes(len(block.packed), len(blob))
        )
        self.pending_bytes += len(blob)
        self._writer.put(order)

    def resize(self, block: Block, size_bytes: int) -> None:
        """Count a block that is here as what it takes now."""
        self.used_bytes += size_bytes - block.disk_bytes
        self._shares.resize(block.root, size_bytes - block.disk_bytes)
        block.disk_bytes = size_bytes

    def remove(self, block: Block, *, aside: bool = False) -> None:
        """Take a leaf of the tree off the disk; `aside` keeps its file for a look at it."""
        if not block.disk_bytes:
            return
        self.used_bytes -= block.disk_bytes
        self._shares.leave(block.root, block.key, block.disk_bytes)
        block.disk_bytes, block.filed = 0, None
        self._forget_pending(block.key)
        self._writer.put(Remove(block.key, aside))

    def discard(self, key: bytes) -> None:
        """Remove what the index should not have."""
        self._writer.put(Remove(key, aside=False))

    def queued(self, block: Block) -> Blob | None:
        """The bytes of a block that is still waiting to be written."""
        order = self._pending.get(block.key)
        return order.record.blob if order else None

    def settle(self, orders: Iterable[WriteOrder]) -> list[WriteOrder]:
        """The writer is through with these; those of them that were not overtaken."""
        settled = [order for order in orders if self._pending.get(order.key) is order]
        for order in settled:
            self._forget_pending(order.key)
        return settled

    def _forget_pending(self, key: bytes) -> None:
        if order := self._pending.pop(key, None):
            self.pending_bytes -= len(order.record.blob)

    def shrink(self, state: State, shortfall_bytes: int) -> None:
        """A write failed. On a full disk the tier gives back what was missing; on any other fault
        it stops writing until it is told to try again."""
        self.state = state
        if state == "full":
            self._ceiling_bytes = max(
                min(self._ceiling_bytes, self.used_bytes) - shortfall_bytes, 0
            )

    def try_again(self) -> None:
        """Believe in the disk once more; the next write shows."""
        self._ceiling_bytes = self.limit_bytes
        self.state = "ok"

    def journal(self, change: Change) -> None:
        """Have a change of entries or names written to the index."""
        self._writer.put(change)

    def give_way(self, busy: bool) -> None:
        """Write little while turns are computed."""
        self._writer.give_way(busy)

    def back_up(self) -> None:
        self._writer.put(BackUp())

    def flush(self, then: Callable[[], None]) -> None:
        """Call back on the engine's thread when all that was asked for before is settled."""
        self._writer.put(Flushed(then))

    # -- reading -------------------------------------------------------------------------------

    def read(self, blocks: Sequence[Block]) -> Fetch:
        """Start reading; Fetched is told when all of them are there or known to be bad."""
        kinds = {block.key: block.kind for block in blocks}
        fetch = Fetch({block.key: block for block in blocks}, kinds, len(blocks))
        lock = threading.Lock()
        for block in blocks:
            size = record_bytes(len(block.packed), block.size_bytes)
            self._readers.submit(self._read_one, fetch, lock, block.key, size)
        return fetch

    def _read_one(self, fetch: Fetch, lock: threading.Lock, key: bytes, size: int) -> None:
        found: Record | str | None = None  # None: no fault of the file, so it is a plain miss
        try:
            found = self.folder.vault.read(key, size)
        except CorruptBlock as error:
            found = str(error)
        except Exception:  # no handles or no memory just now; whatever it is, a turn waits
            log.exception("reading a block failed")
        with lock:
            if isinstance(found, Record):
                fetch.records[key] = found
            elif found is not None:
                fetch.bad[key] = found
            fetch.wanted -= 1
            last = not fetch.wanted
        if last:
            self._tell(Fetched(fetch))

    # -- ending --------------------------------------------------------------------------------

    def close(self) -> None:
        """Write what is queued, then let go of the folder."""
        self._writer.close()
        self._readers.shutdown(wait=True)
        self.folder.close()
