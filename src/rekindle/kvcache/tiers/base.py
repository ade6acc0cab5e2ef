"""A tier: a place where copies of blocks live, within a budget.

The store keeps its tiers in order, the fastest first, and asks each of them through this interface
alone. Whatever takes time is started here and reported later as an event; the thread that owns the
engine takes events in, and never waits.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from rekindle.kvcache.block import Block, BlockKind, Copy
from rekindle.kvcache.codec import Record
from rekindle.kvcache.disk.image_files import PictureRead
from rekindle.kvcache.eviction.hit_density import HitDensity
from rekindle.kvcache.eviction.policy import Evictor
from rekindle.protocol.settings import EvictionPolicy
from rekindle.tokens import Tokens

# ----------------------------------------------------------------------
# The accounting that tiers have in common: what they may hold, what they do, and who holds it.


class TierBudget:
    """Copies of blocks appear and vanish here alone."""

    def __init__(
        self,
        tier: str,
        limit_bytes: int,
        *,
        persistent: bool,
        eviction: EvictionPolicy = "hit-density",
    ) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._tier = tier
        self._persistent = persistent
        self._full_bytes: int | None = None  # all it takes while its medium is full
        self._evictor = Evictor(eviction)

    # -- looking -------------------------------------------------------------------------------

    def held_bytes(self, tenant: bytes) -> int:
        """What one tenant holds."""
        return self._evictor.held_bytes(tenant)

    def fits(self, cost: int) -> bool:
        return self.used_bytes + cost <= self._most_bytes

    def could_fit(self, cost: int) -> bool:
        """Whether so much would fit if nothing else were here."""
        return cost <= self._most_bytes

    @property
    def _most_bytes(self) -> int:
        most = self._full_bytes
        return self.limit_bytes if most is None else min(self.limit_bytes, most)

    def next_victim(self, spared: Container[bytes]) -> bytes | None:
        """The key of the block to make room with; it stays until it leaves."""
        return self._evictor.next_victim(spared)

    def reuse_probability(self, block: Block) -> float:
        """That a block is used again, as far as is known."""
        return self._evictor.reuse_probability(block.tenant, block.key)

    @property
    def estimator(self) -> HitDensity:
        """What this tier has learned about reuse, to be kept for the next process."""
        return self._evictor.estimator

    # -- counting ------------------------------------------------------------------------------

    def use(self, block: Block) -> None:
        """Count a use, which keeps the block longer."""
        self._evictor.use(block.tenant, block.key)

    def enter(self, block: Block, size_bytes: int, written: BlockKind | None) -> None:
        """Count a new copy. Of a chain, any part may come first."""
        above = block.parent
        parent = above.key if above is not None and self._tier in above.copies else None
        self._evictor.add(block.tenant, block.key, parent, size_bytes)
        for child in block.children.values():
            if self._tier in child.copies:
                self._evictor.set_parent(block.tenant, child.key, block.key)
        block.copies[self._tier] = Copy(size_bytes, self._persistent, written)
        self.used_bytes += size_bytes

    def resize(self, block: Block, size_bytes: int) -> None:
        """Count a copy that is here as what it takes now."""
        copy = block.copies[self._tier]
        more_bytes = size_bytes - copy.size_bytes
        self._evictor.resize(block.tenant, more_bytes)
        self.used_bytes += more_bytes
        copy.size_bytes = size_bytes

    def leave(self, block: Block) -> bool:
        """Stop counting a copy; False: there is none."""
        copy = block.copies.pop(self._tier, None)
        if copy is None:
            return False
        self.used_bytes -= copy.size_bytes
        self._evictor.remove(block.tenant, block.key, copy.size_bytes)
        return True

    # -- a full medium -------------------------------------------------------------------------

    def shrink(self, shortfall_bytes: int) -> None:
        """Take less than now by so much, until the limit is restored: the medium is full."""
        most_bytes = min(self._most_bytes, self.used_bytes)
        self._full_bytes = max(most_bytes - shortfall_bytes, 0)

    def restore_limit(self) -> None:
        self._full_bytes = None


Blob = bytes | bytearray | memoryview
TierState = Literal["ok", "full", "failing"]

DEVICE = "device"  # what the engine's own memory is called beside the tiers of the store


@dataclass(frozen=True, slots=True, eq=False)
class Write:
    """A block to be written; a later write of the same key is another one."""

    key: bytes
    record: Record
    size_bytes: int

    @property
    def kind(self) -> BlockKind:
        return BlockKind(len(self.record.blob), self.record.exact, self.record.resumable)


class StoredBlock(NamedTuple):
    """A block that a tier held when it was opened."""

    key: bytes
    parent: bytes
    namespace: bytes
    tokens: Tokens
    kind: BlockKind


@dataclass(slots=True, eq=False)
class Fetch:
    """Blocks on their way up from a tier. When it is done each is among the records, or bad, or was
    missed for no fault of its copy."""

    tier: str
    blocks: dict[bytes, Block]  # what was asked for, in order
    kinds: dict[bytes, BlockKind]  # what they were then
    size_bytes: int  # that it takes of memory
    is_done: bool = False
    is_released: bool = False  # nobody waits for it: what is not being read yet need not be
    is_late: bool = False  # it was given up, so its tier is left out until it is done
    records: dict[bytes, Record] = field(default_factory=dict)
    bad: dict[bytes, str] = field(default_factory=dict)

    @classmethod
    def of(cls, tier: str, blocks: Sequence[Block]) -> Fetch:
        kinds = {block.key: block.kind for block in blocks}
        copies = [block.copies[tier].written or block.kind for block in blocks]
        size_bytes = sum(kind.size_bytes for kind in copies)
        return cls(tier, {block.key: block for block in blocks}, kinds, size_bytes)

    def blob(self, block: Block) -> Blob | None:
        """The state that was read, if it is of use for the block as it is now."""
        record = self.records.get(block.key)
        if record is None or not serves(record, block):
            return None
        return record.blob[: block.size_bytes]


def serves(record: Record, block: Block) -> bool:
    """Whether a record is as good as its block, or better in what can be left off."""
    return record.exact >= block.exact and record.resumable >= block.resumable


@dataclass(frozen=True, slots=True)
class Written:
    """These writes are done, and would survive the end of the process."""

    tier: str
    writes: tuple[Write, ...]


@dataclass(frozen=True, slots=True)
class WriteFailed:
    """These are not done, and why; `is_there` when their bytes are there and will be found when the
    tier is next opened, though it cannot say so now."""

    tier: str
    writes: tuple[Write, ...]
    state: TierState
    reason: str
    is_there: bool = False


@dataclass(frozen=True, slots=True)
class Fetched:
    """A tier has read all that a fetch asked of it."""

    fetch: Fetch


@dataclass(frozen=True, slots=True)
class Flushed:
    """Everything asked for before is done, or has failed; `is_safe` unless a removal or a change of
    what is remembered is among what failed."""

    then: Callable[[bool], None]  # with `is_safe`
    is_safe: bool = True


@dataclass(frozen=True, slots=True)
class Unavailable:
    """A tier cannot be opened now, and why; it is tried again."""

    tier: str
    state: str
    reason: str


@dataclass(frozen=True, slots=True)
class Opened:
    """A tier is there; what it holds is reported as it is read."""

    tier: str


@dataclass(frozen=True, slots=True)
class Found:
    """What a tier holds that was opened beside the turns, parents first; `is_all` at the end."""

    tier: str
    blocks: tuple[StoredBlock, ...]
    is_all: bool = False


TierEvent = Written | WriteFailed | Fetched | Flushed | Unavailable | Opened | Found | PictureRead
OnEvent = Callable[[TierEvent], None]


@dataclass(slots=True)
class TierCounts:
    written_bytes: int = 0
    read_bytes: int = 0
    corrupt_blocks: int = 0


class Tier(Protocol):
    """Called by the engine's thread only. A tier below the first is closed under parents: whoever
    puts a block there has put its parent before, and removes it after."""

    name: str
    persistent: bool  # what it holds outlives the process
    is_open: bool  # else it takes nothing yet, and may hold more than is known
    budget: TierBudget
    state: TierState
    counts: TierCounts
    pending_bytes: int  # state that waits in memory to be written

    # -- its blocks ----------------------------------------------------------------------------

    def cost(self, tokens: Tokens, state_bytes: int) -> int:
        """What a block takes of the budget."""

    def holds(self, block: Block) -> bool:
        """Whether it has a copy, or will have one when it is written."""

    def get(self, block: Block) -> Blob | None:
        """The block's bytes if they are at hand; else they have to be read."""

    def put(self, block: Block, blob: Blob) -> None:
        """Take a copy, in place of the one that is here; whoever puts makes room first."""

    def remove(self, block: Block, *, quarantine: bool = False) -> None:
        """Let go of the copy, if there is one, of a block without children here; `quarantine` keeps
        bad bytes for a look at them."""

    def resize(self, block: Block, kind: BlockKind) -> None:
        """Count a copy that is here as one of this kind: its replacement was not written."""

    def read(self, blocks: Sequence[Block], fetch: Fetch) -> None:
        """Start reading what is not at hand; `Fetched` follows, soon if the fetch is released."""

    # -- its writes ----------------------------------------------------------------------------

    @property
    def takes_writes(self) -> bool: ...

    @property
    def has_queue_room(self) -> bool:
        """Whether more may wait to be written."""

    def complete(self, event: Written | WriteFailed) -> list[Write]:
        """Stop waiting for these writes; those of them that were not overtaken since."""

    def fail(self, event: WriteFailed) -> None:
        """Take in the failure, after its blocks were removed: a full medium gets back what was
        missing; after any other fault nothing is written until the next try."""

    def retry(self) -> None:
        """Accept writes again after a failure; the next one shows."""

    def flush(self, then: Callable[[bool], None]) -> None:
        """Have `Flushed` reported when all that was asked for before is done or has failed."""

    # -- beginning and end ---------------------------------------------------------------------

    def stored(self) -> Iterable[StoredBlock]:
        """What it held when it was opened, parents first."""

    def adopt(self, block: Block, kind: BlockKind) -> None:
        """Count a block that it held when it was opened."""

    def discard(self, key: bytes) -> None:
        """Remove what it held when it was opened and nobody can use."""

    def close(self) -> None:
        """Finish what was asked for."""


class BaseTier:
    """What tiers have in common: a name, a budget, and how they take failures."""

    def __init__(
        self, name: str, limit_bytes: int, *, persistent: bool, eviction: EvictionPolicy
    ) -> None:
        self.name = name
        self.persistent = persistent
        self.is_open = True
        self.budget = TierBudget(name, limit_bytes, persistent=persistent, eviction=eviction)
        self.state: TierState = "ok"
        self.counts = TierCounts()
        self.pending_bytes = 0

    def holds(self, block: Block) -> bool:
        return self.name in block.copies

    @property
    def takes_writes(self) -> bool:
        return self.is_open and self.state != "failing"

    def fail(self, event: WriteFailed) -> None:
        self.state = event.state
        if event.state == "full":
            self.budget.shrink(sum(write.size_bytes for write in event.writes))

    def retry(self) -> None:
        self.budget.restore_limit()
        self.state = "ok"
