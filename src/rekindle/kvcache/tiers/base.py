"""Defines what a tier is: a place that holds copies of blocks within a byte budget.

The store has its tiers in order, fastest first, and uses only this interface. A slow operation is
started here and reported later as an event. The engine's thread handles the events and never waits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from msgspec import Struct

from rekindle.kvcache.block import Block, BlockKind, Copy
from rekindle.kvcache.codec import Record
from rekindle.kvcache.eviction.policy import Evictor
from rekindle.memory import Buffer
from rekindle.protocol.settings import EvictionPolicy
from rekindle.tokens import Tokens

TierState = Literal["ok", "full", "failing"]

DEVICE = "device"  # the engine's own memory, which is not a tier of the store


class TierBudget:
    """Counts the copies in a tier. Copies of blocks are added and removed only here."""

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
        self._full_bytes: int | None = None  # a lower limit while the medium is full
        self._evictor = Evictor(eviction)
        self.estimator = self._evictor.estimator  # saved for the next process

    def held_bytes(self, tenant: bytes) -> int:
        return self._evictor.held_bytes(tenant)

    def fits(self, cost: int) -> bool:
        return self.used_bytes + cost <= self._max_bytes

    def could_fit(self, cost: int) -> bool:
        """Whether the cost would fit into an empty tier."""
        return cost <= self._max_bytes

    @property
    def _max_bytes(self) -> int:
        full = self._full_bytes
        return self.limit_bytes if full is None else min(self.limit_bytes, full)

    def next_victim(self, excluded: Container[bytes]) -> bytes | None:
        """The key of the block to evict next. It is not removed."""
        return self._evictor.next_victim(excluded)

    def reuse_probability(self, block: Block) -> float:
        """Estimated probability that the block is used again."""
        return self._evictor.reuse_probability(block.tenant, block.key)

    def use(self, block: Block) -> None:
        """Record a hit, which keeps the block longer."""
        self._evictor.use(block.tenant, block.key)

    def add(self, block: Block, size_bytes: int, written: BlockKind | None) -> None:
        """Count a new copy. The blocks of a chain may be added in any order."""
        above = block.parent
        parent = above.key if above is not None and self._tier in above.copies else None
        self._evictor.add(block.tenant, block.key, parent, size_bytes)
        for child in block.children.values():
            if self._tier in child.copies:
                self._evictor.set_parent(block.tenant, child.key, block.key)
        block.copies[self._tier] = Copy(size_bytes, self._persistent, written)
        self.used_bytes += size_bytes

    def resize(self, block: Block, size_bytes: int) -> None:
        """Change the size of a copy."""
        copy = block.copies[self._tier]
        more_bytes = size_bytes - copy.size_bytes
        self._evictor.resize(block.tenant, more_bytes)
        self.used_bytes += more_bytes
        copy.size_bytes = size_bytes

    def remove(self, block: Block) -> bool:
        """Stop counting a copy. Returns False if there is none."""
        copy = block.copies.pop(self._tier, None)
        if copy is None:
            return False
        self.used_bytes -= copy.size_bytes
        self._evictor.remove(block.tenant, block.key, copy.size_bytes)
        return True

    def shrink(self, shortfall_bytes: int) -> None:
        """Lower the limit below the current use because the medium is full."""
        self._full_bytes = max(min(self._max_bytes, self.used_bytes) - shortfall_bytes, 0)

    def restore_limit(self) -> None:
        self._full_bytes = None


class Write(Struct, frozen=True, eq=False):
    """A block to be written. Two writes of the same key are different writes."""

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
    """A read of several blocks from a tier.

    When it is done, each block is in `records`, or in `bad`, or in neither if it could not be read
    through no fault of its copy.
    """

    tier: str
    blocks: dict[bytes, Block]  # in the order of the request
    kinds: dict[bytes, BlockKind]  # when the fetch began
    size_bytes: int  # of memory
    is_done: bool = False
    is_released: bool = False  # nobody waits, so reads that have not begun are skipped
    is_late: bool = False  # it timed out, and its tier is not used until it is done
    records: dict[bytes, Record] = field(default_factory=dict)
    bad: dict[bytes, str] = field(default_factory=dict)

    @classmethod
    def of(cls, tier: str, blocks: Sequence[Block]) -> Fetch:
        kinds = {block.key: block.kind for block in blocks}
        copies = [block.copies[tier].written or block.kind for block in blocks]
        size_bytes = sum(kind.size_bytes for kind in copies)
        return cls(tier, {block.key: block for block in blocks}, kinds, size_bytes)

    def blob(self, block: Block) -> Buffer | None:
        """The state that was read, if it still serves the block."""
        record = self.records.get(block.key)
        if record is None or not serves(record, block):
            return None
        return record.blob[: block.size_bytes]


def serves(record: Record, block: Block) -> bool:
    """Whether a record is at least as good as its block. A checkpoint at its end can be cut off."""
    return record.exact >= block.exact and record.resumable >= block.resumable


class Written(Struct, frozen=True):
    """These writes are done and would survive the end of the process."""

    tier: str
    writes: tuple[Write, ...]


class WriteFailed(Struct, frozen=True):
    """These writes failed. With `is_there` the bytes are stored and will be found when the tier is
    opened again, but the tier cannot serve them now."""

    tier: str
    writes: tuple[Write, ...]
    state: TierState
    reason: str
    is_there: bool = False


class Fetched(Struct, frozen=True):
    """A tier has finished a fetch."""

    fetch: Fetch


class Flushed(Struct, frozen=True):
    """Every earlier order is done or has failed. `is_safe` is False if a removal or a change of
    entries failed."""

    then: Callable[[bool], None]  # called with `is_safe`
    is_safe: bool = True


class TierUnavailable(Struct, frozen=True):
    """A tier cannot be opened now. It is tried again later."""

    tier: str
    state: str
    reason: str


class TierOpened(Struct, frozen=True):
    """A tier is open. Its blocks are reported as they are read."""

    tier: str


class BlocksFound(Struct, frozen=True):
    """Blocks of a tier that is being opened, parents first. The last event has `is_all`."""

    tier: str
    blocks: tuple[StoredBlock, ...]
    is_all: bool = False


TierEvent = Written | WriteFailed | Fetched | Flushed | TierUnavailable | TierOpened | BlocksFound
OnEvent = Callable[[TierEvent], None]


@dataclass(slots=True)
class TierCounts:
    written_bytes: int = 0
    read_bytes: int = 0
    corrupt_blocks: int = 0


class Tier(ABC):
    """Called from the engine's thread only.

    A tier below the first is closed under parents: a block is put after its parent and removed
    before it. The defaults are those of a tier that holds everything in memory.
    """

    def __init__(
        self, name: str, limit_bytes: int, *, persistent: bool, eviction: EvictionPolicy
    ) -> None:
        self.name = name
        self.persistent = persistent  # its blocks survive the process
        self.is_open = True  # a tier that is being opened takes no writes
        self.budget = TierBudget(name, limit_bytes, persistent=persistent, eviction=eviction)
        self.state: TierState = "ok"
        self.counts = TierCounts()
        self.pending_bytes = 0  # state in memory that waits to be written

    @property
    def capacity_bytes(self) -> int:
        """What the tier can hold now: its budget, or less if the medium has less space."""
        return self.budget.limit_bytes

    @abstractmethod
    def cost(self, tokens: Tokens, state_bytes: int) -> int:
        """What a block takes of the budget, in bytes."""

    def holds(self, block: Block) -> bool:
        """Whether the tier has a copy, or will have one when it is written."""
        return self.name in block.copies

    @abstractmethod
    def get(self, block: Block) -> Buffer | None:
        """The block's bytes if they are in memory. Otherwise they have to be read."""

    @abstractmethod
    def put(self, block: Block, blob: Buffer) -> None:
        """Store a copy, replacing the current one. The caller makes room first."""

    @abstractmethod
    def remove(self, block: Block, *, quarantine: bool = False) -> None:
        """Remove the copy of a block without children here; `quarantine` keeps the bad file."""

    @abstractmethod
    def resize(self, block: Block, kind: BlockKind) -> None:
        """Count a copy as this kind, because its replacement was not written."""

    def read(self, blocks: Sequence[Block], fetch: Fetch) -> None:
        """Start reading blocks that are not in memory. `Fetched` follows in any case."""
        raise NotImplementedError("all blocks are in memory")

    @property
    def takes_writes(self) -> bool:
        return self.is_open and self.state != "failing"

    @property
    def has_queue_room(self) -> bool:
        """Whether the write queue has room."""
        return True

    def complete(self, event: Written | WriteFailed) -> list[Write]:
        """Remove these writes from the queue. Returns those that no later write has replaced."""
        return []

    def fail(self, event: WriteFailed) -> None:
        """Handle a failed write, after its blocks were removed. On a full medium the budget
        shrinks. After another error nothing is written until `retry`."""
        self.state = event.state
        if event.state == "full":
            self.budget.shrink(sum(write.size_bytes for write in event.writes))

    def retry(self) -> None:
        """Accept writes again after a failure."""
        self.budget.restore_limit()
        self.state = "ok"

    def flush(self, then: Callable[[bool], None]) -> None:
        """Report `Flushed` when every earlier order is done or has failed."""
        then(True)

    def stored(self) -> Iterable[StoredBlock]:
        """The blocks that the tier held when it was opened, parents first."""
        return ()

    def adopt(self, block: Block, kind: BlockKind) -> None:
        """Count a block that was stored when the tier was opened."""
        raise NotImplementedError("nothing is stored when it is opened")

    def discard(self, key: bytes) -> None:
        """Remove a stored block that cannot be used."""
        raise NotImplementedError("nothing is stored when it is opened")

    @abstractmethod
    def close(self) -> None:
        """Finish every order, then release the resources."""


class Tiers(tuple[Tier, ...]):
    """The tiers of a store, fastest first."""

    __slots__ = ()

    def get(self, block: Block) -> Buffer | None:
        """The block's state if a tier has it in memory."""
        for tier in self:
            if (blob := tier.get(block)) is not None:
                # The copy may have a checkpoint that the block does not claim.
                return blob if len(blob) == block.size_bytes else blob[: block.size_bytes]
        return None

    def source(self, block: Block) -> Tier:
        """The fastest tier to read a block from. State in memory counts as the first tier."""
        if self.get(block) is not None:
            return self[0]
        return next(tier for tier in self if tier.holds(block))

    def slowest(self, blocks: Iterable[Block]) -> str | None:
        """The name of the slowest source of these blocks."""
        return self.slower(*(self.source(block).name for block in blocks))

    def slower(self, *names: str) -> str | None:
        """The slowest of these tiers, or None without names."""
        return next((tier.name for tier in reversed(self) if tier.name in names), None)

    def held_bytes(self, tenant: bytes | None) -> dict[str, int]:
        """Bytes per tier that a tenant holds, or that all tenants hold together."""
        if tenant is None:
            return {tier.name: tier.budget.used_bytes for tier in self}
        return {tier.name: tier.budget.held_bytes(tenant) for tier in self}

    @property
    def is_congested(self) -> bool:
        """Whether the write queue of a tier is full."""
        return not all(tier.has_queue_room for tier in self)

    def flush(self, then: Callable[[bool], None]) -> None:
        """Call back on this thread when every tier has finished its earlier orders. The argument
        says whether removals and changes of entries are safe in all tiers."""
        outcomes: list[bool] = []

        def flushed(is_safe: bool) -> None:
            outcomes.append(is_safe)
            if len(outcomes) == len(self):
                then(all(outcomes))

        for tier in self:
            tier.flush(flushed)
