"""Describes the cache for clients: its entries, page by page, and its statistics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from itertools import islice

from blake3 import blake3
from msgspec.structs import replace

from rekindle.chat.describe import Preview
from rekindle.kvcache.block import chain
from rekindle.kvcache.entries.entry import Entry
from rekindle.protocol.admin import (
    EntryInfo,
    EntryList,
    EntryName,
    GetStats,
    ListEntries,
    Segment,
    Stats,
)
from rekindle.protocol.events import Status
from rekindle.runtime.device.offload import Counts
from rekindle.runtime.model_process import PIECE_ENTRIES, Pieces
from rekindle.runtime.reuse.admission import Planner
from rekindle.runtime.storage.storage import Storage


def tenant_id(namespace: bytes) -> str:
    """How an admin sees a tenant. It differs between models and between servers."""
    return blake3(namespace).hexdigest()[:12]


View = bytes | None  # the namespace that the caller may see; None: an admin sees all of them


@dataclass(frozen=True, slots=True)
class CacheInfo:
    """Called by the engine's thread. Long work yields between its pieces."""

    storage: Storage
    planner: Planner
    preview: Preview
    counts: Counts
    #: Number of turns by reuse status, in each view.
    statuses: MutableMapping[View, Counter[Status]]
    active_turns: Callable[[], int]

    def info(self, entry: Entry) -> EntryInfo:
        blocks, ends = list(chain(entry.block)), list(self.planner.resume_points(entry))
        left_s = entry.expires_in_s(self.storage.clock)
        count = len(entry.tokens)
        stored = (block.stop for block in ends if block.stored)
        return EntryInfo(
            cache_key=entry.key,
            segments=[Segment(*segment) for segment in entry.segments],
            token_count=count,
            tier=self.storage.store.tiers.slowest(blocks),
            size_bytes=entry.state_bytes,
            held_tokens=min(max((block.stop for block in ends), default=0), count),
            stored_tokens=min(max(stored, default=0), count),
            hit_count=entry.hits,
            pinned=entry.pinned,
            ttl=entry.ttl_s,
            created_at=entry.created_at,
            last_used=entry.last_used_at,
            expires_at=None if left_s is None else self.storage.clock.wall_s() + left_s,
            names=[EntryName(kind, name) for kind, name in sorted(entry.names)],
            tenant=tenant_id(entry.tenant),
            lru_position=entry.place,
            has_document=bool(entry.document),
        )

    def info_with_preview(self, entry: Entry, own: bytes) -> EntryInfo:
        """Add a preview of the text for the entry's own tenant. An admin does not get the text of
        others."""
        info = self.info(entry)
        return replace(info, preview=self.preview.of(entry.text)) if entry.tenant == own else info

    def page(self, op: ListEntries, view: View, own: bytes) -> Pieces[EntryList]:
        # One entry more than requested shows whether there is a next page.
        found = list(islice(self.storage.entries.newest(view, op.before), op.limit + 1))
        listed = []
        for entry in found[: op.limit]:
            yield
            if entry.place:  # skip entries that were removed in the meantime
                listed.append(self.info_with_preview(entry, own))
        rest = found[op.limit :]
        return EntryList(listed, next=rest[0].place + 1 if rest else None)

    def stats(self, op: GetStats, view: View) -> Pieces[Stats]:
        """Return the running counts. Only entries have to be counted, piece by piece."""
        turns = self.statuses[view]
        ram_bytes, disk_bytes = self.storage.held_bytes(view)
        stats = Stats(
            entries=0,
            pinned_entries=0,
            by_tier={tier.name: 0 for tier in self.storage.store.tiers},
            ram_bytes=ram_bytes,
            disk_bytes=disk_bytes,
            unique_bytes=self.storage.store.size_bytes(view),
            logical_bytes=0,
            hits=turns["hit"],
            partial_hits=turns["partial_hit"],
            misses=turns["miss"],
            evictions=self.storage.store.evictions(view),
        )
        if view is None:
            stats.computed_tokens = self.counts.computed_tokens
            stats.reused_tokens = self.counts.reused_tokens
            stats.active_turns = self.active_turns()
            self.storage.add_totals(stats)
        if op.of_entries:
            yield from self._count_entries(view, stats)
        return stats

    def forget_tenant(self, tenant: bytes) -> None:
        """Forget the tenant's part of the counts."""
        self.statuses.pop(tenant, None)
        self.storage.store.counts.evicted.pop(tenant, None)

    def _count_entries(self, view: View, stats: Stats) -> Pieces[None]:
        """Count living entries, most recently used first. An entry that is used between two pieces
        may be missed, but is never counted twice."""
        entries, tiers = self.storage.entries, self.storage.store.tiers
        before: int | None = None
        while piece := list(islice(entries.newest(view, before), PIECE_ENTRIES)):
            for entry in piece:
                stats.entries += 1
                stats.pinned_entries += entry.pinned
                if entry.block is not None and not entry.block.is_root:
                    stats.by_tier[tiers.source(entry.block).name] += 1
                    stats.logical_bytes += entry.state_bytes
            before = piece[-1].place
            yield
