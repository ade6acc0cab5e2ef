"""An entry of the cache as clients see it."""

from __future__ import annotations

from msgspec import structs
from pydantic import BaseModel

from rekindle.protocol.admin import EntryInfo, Removed


class SegmentBody(BaseModel):
    type: str
    hash: str


class NameBody(BaseModel):
    kind: str
    name: str


class EntryBody(BaseModel):
    """Stored state: its conversation, tier, size and lifetime."""

    cache_key: str
    model: str
    segments: list[SegmentBody]
    token_count: int
    stored_tokens: int  # that would survive the end of the server
    tier: str | None
    size_bytes: int
    hit_count: int
    pinned: bool
    ttl: float | None
    created_at: float
    last_used: float
    expires_at: float | None
    names: list[NameBody]
    preview: str  # the first words of its last user message; empty when it is somebody else's
    tenant: str | None = None  # for the admin alone
    durable: bool = True  # only in an answer that says no


class Prepared(BaseModel):
    cache_key: str
    model: str
    token_count: int
    size_bytes: int
    segments: list[SegmentBody]
    durable: bool = True


def durability(*results: EntryInfo | Removed) -> dict[str, bool]:
    """What an answer says when the disk did not take what was asked: it holds until a restart.
    Otherwise nothing."""
    return {} if all(result.durable for result in results) else {"durable": False}


def entry_body(info: EntryInfo, model: str, *, admin: bool) -> EntryBody:
    fields = structs.asdict(info)
    del fields["durable"]
    fields |= {"model": model, "segments": _segments(info), **durability(info)}
    fields["names"] = [NameBody(kind=each.kind, name=each.name) for each in info.names]
    if not admin:
        del fields["tenant"]
    return EntryBody(**fields)


def prepared(info: EntryInfo, model: str) -> Prepared:
    return Prepared(
        cache_key=info.cache_key,
        model=model,
        token_count=info.token_count,
        size_bytes=info.size_bytes,
        segments=_segments(info),
        **durability(info),
    )


def _segments(info: EntryInfo) -> list[SegmentBody]:
    return [SegmentBody(type=each.type, hash=each.hash) for each in info.segments]
