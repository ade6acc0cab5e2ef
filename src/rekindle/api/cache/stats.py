"""Serves /v1/cache/stats: the contents of the cache and its hit rate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request

from rekindle.api.base.admin import AdminClient
from rekindle.api.base.loading import chosen
from rekindle.api.base.models import ModelNumber
from rekindle.protocol.admin import HEALTHY_DISK_STATES, GetStats, Stats

DERIVED = ("by_tier", "turns", "hit_rate", "disk_state")  # figures that are not plain sums

router = APIRouter(tags=["cache"])


class CacheStats(BaseModel):
    """Figures of the calling tenant. Only admins see those of the whole server."""

    total_entries: int
    by_tier: dict[str, int]
    ram_bytes: int
    disk_bytes: int
    unique_bytes: int  # shared state counts once
    logical_bytes: int  # shared state counts for each entry
    turns: int  # since the server started: the sum of hits, partial hits and misses
    total_hits: int
    total_partial_hits: int
    total_misses: int
    hit_rate: float
    pinned_entries: int
    evictions: int

    ram_limit_bytes: int | None = None
    disk_limit_bytes: int | None = None
    disk_state: str | None = None
    disk_queued_bytes: int | None = None
    disk_written_bytes: int | None = None
    disk_read_bytes: int | None = None
    corrupt_blocks: int | None = None
    computed_tokens: int | None = None
    reused_tokens: int | None = None
    active_turns: int | None = None
    encoded_pictures: int | None = None  # by the projector
    picture_hits: int | None = None  # images whose encoding was reused
    picture_ram_bytes: int | None = None
    picture_disk_bytes: int | None = None


@router.get("/v1/cache/stats", response_model_exclude_unset=True)
async def show_stats(request: Request, number: ModelNumber = None) -> CacheStats:
    """Show the figures of all models together, or of the numbered one."""
    client, runtimes = AdminClient.of(request), await chosen(request, number)
    stats = [await client.request(runtime, GetStats(), Stats) for runtime in runtimes]
    return total(stats, admin=client.is_admin)


def total(stats: Sequence[Stats], *, admin: bool) -> CacheStats:
    """Add up the figures of all models, under the names of `Stats` without "total_"."""
    fields: dict[str, Any] = {
        name: sum(getattr(each, name.removeprefix("total_")) for each in stats)
        for name, field in CacheStats.model_fields.items()
        if name not in DERIVED and (admin or field.is_required())
    }
    if admin:
        fields["disk_state"] = _worst(each.disk_state for each in stats)
    by_tier: Counter[str] = Counter()
    for each in stats:
        by_tier.update(each.by_tier)
    good = fields["total_hits"] + fields["total_partial_hits"]
    turns = good + fields["total_misses"]
    hit_rate = round(good / turns, 4) if turns else 0.0
    return CacheStats(**fields, by_tier=by_tier, turns=turns, hit_rate=hit_rate)


def _worst(states: Iterable[str]) -> str:
    """The first unhealthy state. Otherwise "ok" if any disk tier is in use."""
    found = set(states)
    unhealthy = sorted(found - set(HEALTHY_DISK_STATES))
    return unhealthy[0] if unhealthy else min(found, key=HEALTHY_DISK_STATES.index, default="off")
