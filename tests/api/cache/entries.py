"""Entries and figures as a scripted runtime tells them."""

from __future__ import annotations

from typing import Any

from msgspec import structs

from rekindle.protocol import wire
from tests.api.scripted import UNKNOWN_KEY, Answers

ENTRY = wire.EntryInfo(
    cache_key="key-1",
    segments=[wire.Segment("system", "a1b2c3d4"), wire.Segment("turn", "00ff00ff")],
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
    names=[wire.NameInfo("session_id", "chat-123")],
    tenant="7e4a",
)
STATS = wire.Stats(
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
    turns=3,
)


def entry(cache_key: str, **fields: Any) -> wire.EntryInfo:
    return structs.replace(ENTRY, cache_key=cache_key, **fields)


def stats(**fields: Any) -> wire.Stats:
    return structs.replace(STATS, **fields)


def holding(*entries: wire.EntryInfo) -> Answers:
    """A runtime that has these entries and no others."""
    known = {each.cache_key: each for each in entries}

    def answer(op: wire.CacheOp) -> wire.CacheAnswer:
        match op:
            case wire.ListEntries():
                return wire.Listing(list(known.values()))
            case wire.ShowEntry(key) | wire.Settle(key) if key in known:
                return known[key]
            case wire.PinEntry(key, pinned) if key in known:
                return structs.replace(known[key], pinned=pinned)
            case wire.DeleteEntry(key) if key in known:
                return wire.Removed(1, known[key].size_bytes)
        return UNKNOWN_KEY

    return answer


def telling(answer: wire.CacheAnswer) -> Answers:
    """A runtime that says this to whatever it is asked."""
    return lambda _op: answer
