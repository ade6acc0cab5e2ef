"""Counts what entries hold, and finds the ones that expire or give way next.

All counts follow each change of an entry, so no turn has to look at all entries.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from rekindle.kvcache.block import PrefixHandle, chain_key
from rekindle.kvcache.entries.entry import Entry
from rekindle.kvcache.eviction.policy import TenantSizes
from rekindle.kvcache.tiers.base import Tier
from rekindle.tokens import Tokens

MIN_STALE = 64  # outdated times that are worth removing


@dataclass(frozen=True, slots=True)
class EntryLimits:
    """The memory for entries, and the sizes of the engine's state, by which pins are measured."""

    memory_bytes: int = 64 << 20
    token_bytes: int = 0
    checkpoint_bytes: int = 0


class Expiries:
    """The times at which entries have to be looked at, because they or their pins may be over.

    A use postpones the end of an entry without moving its time. So the entry is looked at too
    early once, and then gets its new time. The heap has keys instead of entries, so that a time
    that is left behind by a deleted entry does not keep its document in memory.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []
        self._times: dict[str, float] = {}  # the next time of each entry

    def __len__(self) -> int:
        return len(self._times)

    def schedule(self, key: str, at_s: float) -> None:
        """Look at an entry at this time, or earlier if that is planned already."""
        if self._times.get(key, at_s + 1.0) <= at_s:
            return
        self._times[key] = at_s
        heappush(self._heap, (at_s, key))
        self._remove_stale()

    def drop(self, key: str) -> None:
        if self._times.pop(key, None) is not None:
            self._remove_stale()

    def pop_due(self, now_s: float) -> str | None:
        """Remove and return the key of an entry whose time has come."""
        while self._heap and self._heap[0][0] <= now_s:
            at_s, key = heappop(self._heap)
            if self._times.get(key) == at_s:
                del self._times[key]
                return key
        return None

    def _remove_stale(self) -> None:
        if len(self._heap) > MIN_STALE + 2 * len(self._times):
            self._heap = [(at_s, key) for key, at_s in self._times.items()]
            heapify(self._heap)


@dataclass(slots=True)
class _PinnedBlock:
    costs: tuple[int, ...]  # in each tier
    uses: int = 0  # pinned conversations that go through it


class PinnedBlocks:
    """What pinned conversations take of each tier once they are computed, each with a checkpoint of
    its end. Shared blocks count once."""

    def __init__(self, tiers: Sequence[Tier], block_tokens: int, limits: EntryLimits) -> None:
        self._tiers = tiers
        self._block_tokens = block_tokens
        self._token_bytes = limits.token_bytes
        self._checkpoint_bytes = limits.checkpoint_bytes
        self._blocks: dict[bytes, _PinnedBlock] = {}
        self._held: dict[str, Counter[bytes | None]] = {tier.name: Counter() for tier in tiers}

    def held_bytes(self, tier: Tier, tenant: bytes | None) -> int:
        """What the pins of a tenant, or of all tenants, take of a tier."""
        return self._held[tier.name][tenant]

    def missing_bytes(self, tier: Tier, handle: PrefixHandle) -> int:
        """What a conversation would add if it were pinned."""
        at = [each.name for each in self._tiers].index(tier.name)
        parts = self._parts(handle.namespace, handle.tokens)
        return sum(costs[at] for key, costs in parts if key not in self._blocks)

    def add(self, tenant: bytes, namespace: bytes, tokens: Tokens) -> None:
        for key, costs in self._parts(namespace, tokens):
            block = self._blocks.get(key)
            if block is None:
                block = self._blocks[key] = _PinnedBlock(costs)
                self._count(tenant, costs, 1)
            block.uses += 1

    def remove(self, tenant: bytes, namespace: bytes, tokens: Tokens) -> None:
        for key, costs in self._parts(namespace, tokens):
            block = self._blocks[key]
            block.uses -= 1
            if not block.uses:
                del self._blocks[key]
                self._count(tenant, costs, -1)

    def _count(self, tenant: bytes, costs: tuple[int, ...], sign: int) -> None:
        for tier, cost in zip(self._tiers, costs, strict=True):
            held = self._held[tier.name]
            for view in (tenant, None):
                held[view] += sign * cost
                if not held[view]:
                    del held[view]

    def _parts(self, namespace: bytes, tokens: Tokens) -> Iterator[tuple[bytes, tuple[int, ...]]]:
        """The blocks of a conversation and the checkpoint after the last one, with their costs. No
        other part of any conversation has the same key."""
        key, size = namespace, self._block_tokens
        for start in range(0, len(tokens), size):
            part = tokens[start : start + size]
            key = chain_key(key, part)
            costs = self._costs(part, len(part) * self._token_bytes)
            yield key, costs
        if tokens and self._checkpoint_bytes:
            state_bytes = len(part) * self._token_bytes + self._checkpoint_bytes
            more = zip(self._costs(part, state_bytes), costs, strict=True)
            yield key + b"checkpoint", tuple(whole - cells for whole, cells in more)

    def _costs(self, tokens: Tokens, state_bytes: int) -> tuple[int, ...]:
        return tuple(tier.cost(tokens, state_bytes) for tier in self._tiers)


@dataclass(frozen=True, slots=True)
class _Counted:
    """An entry as it was counted last."""

    cost_bytes: int
    pinned: bool
    is_free: bool
    namespace: bytes
    place: int


class Retention:
    """The memory of all entries by tenant, what is pinned of it, and who gives way next."""

    def __init__(self, pinned_blocks: PinnedBlocks) -> None:
        self.used_bytes = 0
        self.held_bytes: Counter[bytes] = Counter()  # by tenant
        self.pinned_bytes: Counter[bytes | None] = Counter()  # by tenant; None for all of them
        self.pinned_blocks = pinned_blocks
        self.expiries = Expiries()
        self._counted: dict[Entry, _Counted] = {}
        #: Unpinned entries by tenant and by `is_free`, least recently used first.
        self._unpinned: dict[tuple[bytes, bool], OrderedDict[Entry, None]] = {}
        self._sizes = TenantSizes()  # of tenants that have unpinned entries

    def update(self, entry: Entry) -> None:
        """Count an entry as it is now. One without a place was removed."""
        before, now = self._counted.get(entry), _count(entry)
        if entry.place and entry.due_s is not None:
            self.expiries.schedule(entry.key, entry.due_s)
        if before == now:
            return
        if before is not None:
            self._count(entry.tenant, before, -1)
        if now is not None:
            self._counted[entry] = now
            self._count(entry.tenant, now, 1)
        else:
            self._counted.pop(entry, None)
            self.expiries.drop(entry.key)
        self._move(entry, before, now)
        self._set_pin(entry, before, now)
        self._rank(entry.tenant)

    def tenants_with(self, tenant: bytes) -> int:
        """The number of tenants that have entries, including this one."""
        return len(self.held_bytes) + (tenant not in self.held_bytes)

    def next_victim(self) -> Entry | None:
        """The entry that gives way next: of the largest tenant that has an unpinned entry, first
        the unnamed ones, least recently used first."""
        return self._sizes.first(self.next_of)

    def next_of(self, tenant: bytes) -> Entry | None:
        """The entry of a tenant that gives way next."""
        orders = (self._unpinned.get((tenant, is_free), ()) for is_free in (True, False))
        return next((next(iter(order)) for order in orders if order), None)

    def _count(self, tenant: bytes, counted: _Counted, sign: int) -> None:
        more_bytes = sign * counted.cost_bytes
        self.used_bytes += more_bytes
        self.held_bytes[tenant] += more_bytes
        if not self.held_bytes[tenant]:
            del self.held_bytes[tenant]
        if counted.pinned:
            for view in (tenant, None):
                self.pinned_bytes[view] += more_bytes
                if not self.pinned_bytes[view]:
                    del self.pinned_bytes[view]

    def _move(self, entry: Entry, before: _Counted | None, now: _Counted | None) -> None:
        """Put an unpinned entry at the end of its order, unless its place is unchanged."""
        old = None if before is None or before.pinned else (entry.tenant, before.is_free)
        new = None if now is None or now.pinned else (entry.tenant, now.is_free)
        if old == new and before is not None and now is not None and before.place == now.place:
            return
        if old is not None:
            del self._unpinned[old][entry]
            if not self._unpinned[old]:
                del self._unpinned[old]
        if new is not None:
            self._unpinned.setdefault(new, OrderedDict())[entry] = None

    def _set_pin(self, entry: Entry, before: _Counted | None, now: _Counted | None) -> None:
        old = before.namespace if before is not None and before.pinned else None
        new = now.namespace if now is not None and now.pinned else None
        if old == new:
            return
        if new is not None:
            self.pinned_blocks.add(entry.tenant, new, entry.tokens)
        if old is not None:
            self.pinned_blocks.remove(entry.tenant, old, entry.tokens)

    def _rank(self, tenant: bytes) -> None:
        """Rank the tenant by what it holds, if it has an entry that may be forgotten."""
        if any((tenant, is_free) in self._unpinned for is_free in (True, False)):
            self._sizes.set(tenant, self.held_bytes[tenant])
        else:
            self._sizes.forget(tenant)


def _count(entry: Entry) -> _Counted | None:
    if not entry.place:
        return None
    return _Counted(entry.cost_bytes, entry.pinned, entry.is_free, entry.namespace, entry.place)


class EntryBudget:
    """The memory limit of all entries: tokens, text, replies and documents. State is not included.

    Pins may take half of it, each tenant an equal part of that half, so that the entries of others
    always find room.
    """

    def __init__(self, retention: Retention, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._retention = retention

    def could_fit(self, cost_bytes: int) -> bool:
        """Whether the cost would fit without any other entry."""
        return cost_bytes <= self.limit_bytes

    def pin_limit_bytes(self, tenant: bytes) -> int:
        """What the pinned entries of a tenant may take."""
        return self.limit_bytes // 2 // self._retention.tenants_with(tenant)

    def can_pin(self, tenant: bytes, more_bytes: int) -> bool:
        """Whether pinned entries of a tenant may take this much more."""
        pinned_bytes = self._retention.pinned_bytes
        fits_all = pinned_bytes[None] + more_bytes <= self.limit_bytes // 2
        fits_own = pinned_bytes[tenant] + more_bytes <= self.pin_limit_bytes(tenant)
        return more_bytes <= 0 or (fits_all and fits_own)

    def enforce(self, forget: Callable[[Entry], None]) -> None:
        """Forget entries until the rest fits."""
        while self._retention.used_bytes > self.limit_bytes:
            victim = self._retention.next_victim()
            if victim is None:  # all are pinned, and the limit was lowered
                return
            forget(victim)
