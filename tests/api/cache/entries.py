"""Entries and figures as a scripted runtime reports them."""

from __future__ import annotations

from typing import Any

from msgspec import structs

from rekindle.errors import ReportedError
from rekindle.protocol.admin import (
    AdminOp,
    AdminResult,
    DeleteEntry,
    EntryInfo,
    EntryList,
    EntryName,
    Flush,
    ListEntries,
    NameTenants,
    PinEntry,
    Removed,
    Segment,
    ShowEntry,
    Stats,
    TenantIds,
)
from tests.api.scripted import Answers, unknown_key

ENTRY = EntryInfo(
    cache_key="key-1",
    segments=[Segment("system", "a1b2c3d4"), Segment("turn", "00ff00ff")],
    token_count=1730,
    tier="disk",
    size_bytes=255_120_384,
    held_tokens=1730,
    stored_tokens=1728,
    hit_count=3,
    pinned=True,
    ttl=None,
    created_at=1000.5,
    last_used=2000.25,
    expires_at=None,
    names=[EntryName("session_id", "chat-123")],
    tenant="7e4a",
    preview="What is the moon made of?",
)
STATS = Stats(
    entries=5,
    pinned_entries=1,
    by_tier={"ram": 4, "disk": 1},
    ram_bytes=1000,
    disk_bytes=2000,
    unique_bytes=2500,
    logical_bytes=9000,
    hits=10,
    partial_hits=2,
    misses=2,
    evictions=7,
    ram_limit_bytes=1 << 20,
    disk_limit_bytes=1 << 30,
    disk_state="ok",
    disk_queued_bytes=11,
    disk_written_bytes=12,
    disk_read_bytes=13,
    corrupt_blocks=1,
    computed_tokens=100,
    reused_tokens=900,
    active_turns=3,
)


def entry(cache_key: str, **fields: Any) -> EntryInfo:
    return structs.replace(ENTRY, cache_key=cache_key, **fields)


def stats(**fields: Any) -> Stats:
    return structs.replace(STATS, **fields)


def holding(*entries: EntryInfo) -> Answers:
    """A runtime that has these entries and no others."""
    ascending = sorted(entries, key=lambda each: each.last_used)
    known = {
        each.cache_key: structs.replace(each, lru_position=place)
        for place, each in enumerate(ascending, start=1)
    }

    def answer(op: AdminOp) -> AdminResult:
        match op:
            case ListEntries(limit=limit, before=before):
                below = [e for e in known.values() if before is None or e.lru_position < before][
                    ::-1
                ]
                rest = below[limit:]
                return EntryList(below[:limit], next=rest[0].lru_position + 1 if rest else None)
            case ShowEntry(key) | Flush(key) if key in known:
                return known[key]
            case PinEntry(key, pinned) if key in known:
                return structs.replace(known[key], pinned=pinned)
            case NameTenants(salts, groups):
                ids = [f"tenant-{at}" for at in range(len(salts))]
                return TenantIds(ids, "shared", [f"group-{group}" for group in groups])
            case DeleteEntry(key) if key in known:
                return Removed(1, known[key].size_bytes)
        raise unknown_key()

    return answer


def answering(answer: AdminResult | ReportedError) -> Answers:
    """A runtime that gives this result to every admin request."""

    def say(_op: AdminOp) -> AdminResult:
        if isinstance(answer, ReportedError):
            raise answer
        return answer

    return say
