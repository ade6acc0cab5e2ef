"""Serves /v1/cache/stats: the contents of the cache and its hit rate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request

from rekindle.api.base.admin import AdminClient
from rekindle.api.base.models import ModelNumber, models_of
from rekindle.protocol.admin import HEALTHY_DISK_STATES, GetStats, Stats

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
    models = models_of(request)
    client = AdminClient.of(request)
    stats = [await client.request(runtime, GetStats(), Stats) for runtime in models.chosen(number)]
    return total(stats, admin=client.is_admin)


def total(stats: Sequence[Stats], *, admin: bool) -> CacheStats:
    def added(field: str) -> int:
        return sum(getattr(each, field) for each in stats)

    hits, partial_hits, misses = added("hits"), added("partial_hits"), added("misses")
    own = CacheStats(
        total_entries=added("entries"),
        by_tier=_by_tier(stats),
        ram_bytes=added("ram_bytes"),
        disk_bytes=added("disk_bytes"),
        unique_bytes=added("unique_bytes"),
        logical_bytes=added("logical_bytes"),
        turns=hits + partial_hits + misses,
        total_hits=hits,
        total_partial_hits=partial_hits,
        total_misses=misses,
        hit_rate=_rate(hits + partial_hits, misses),
        pinned_entries=added("pinned_entries"),
        evictions=added("evictions"),
    )
    if not admin:
        return own
    optional = (name for name, field in CacheStats.model_fields.items() if not field.is_required())
    server = {name: added(name) for name in optional if name != "disk_state"}
    disk_state = _worst(each.disk_state for each in stats)
    return own.model_copy(update={**server, "disk_state": disk_state})


def _rate(good: int, bad: int) -> float:
    return round(good / (good + bad), 4) if good + bad else 0.0


def _by_tier(stats: Sequence[Stats]) -> dict[str, int]:
    tiers: Counter[str] = Counter()
    for each in stats:
        tiers.update(each.by_tier)
    return dict(tiers)


def _worst(states: Iterable[str]) -> str:
    """The first unhealthy state. Otherwise "ok" if any disk tier is in use."""
    found = set(states)
    unhealthy = sorted(found - set(HEALTHY_DISK_STATES))
    return unhealthy[0] if unhealthy else min(found, key=HEALTHY_DISK_STATES.index)
