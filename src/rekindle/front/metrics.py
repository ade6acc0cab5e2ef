"""GET /metrics: the figures of every runtime, for Prometheus."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fastapi import APIRouter
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from rekindle.api.base.admin import AdminClient
from rekindle.api.base.models import models_of
from rekindle.errors import Forbidden, ServerError
from rekindle.http.auth import caller_of
from rekindle.http.responses import documented
from rekindle.protocol.admin import HEALTHY_DISK_STATES, GetStats, Stats
from rekindle.worker.client import RuntimeClient

TEXT = "text/plain; version=0.0.4; charset=utf-8"
SCRAPE_S = 5.0  # what a runtime gets to answer; a scraper gives up after ten

GAUGES = {
    "active_turns": "Turns waiting and running.",
    "ram_bytes": "State held in memory.",
    "ram_limit_bytes": "What may be held in memory.",
    "disk_bytes": "State held on disk.",
    "disk_limit_bytes": "What may be held on disk.",
    "disk_queued_bytes": "State waiting to be written to disk.",
    "picture_ram_bytes": "Encoded pictures held in memory.",
    "picture_disk_bytes": "Encoded pictures held on disk.",
}
COUNTERS = {
    "computed_tokens": "Tokens that were computed, of prompts and replies.",
    "reused_tokens": "Prompt tokens that were not computed again.",
    "hits": "Turns that reused all they could have.",
    "partial_hits": "Turns that reused a part.",
    "misses": "Turns that reused not one whole message.",
    "disk_written_bytes": "State written to disk.",
    "disk_read_bytes": "State read from disk.",
    "evictions": "Blocks removed to make room.",
    "corrupt_blocks": "Stored blocks that were not what was stored.",
    "encoded_pictures": "Pictures that the projector encoded.",
    "picture_hits": "Times that a picture's vectors were there already.",
}

router = APIRouter(tags=["metrics"])


@dataclass(frozen=True, slots=True)
class Reading:
    """One runtime's figures; no stats when it did not answer."""

    model: str
    restarts: int
    watchdog_fired: int
    open_turns: int
    stats: Stats | None


@router.get("/metrics", response_class=PlainTextResponse, responses=documented(403))
async def show_metrics(request: Request) -> Response:
    """Figures of the whole server in Prometheus' text format; with API keys, for admins alone."""
    if not caller_of(request).admin:
        raise Forbidden("Metrics are of the whole server: send an admin key.")
    models = models_of(request)
    client = AdminClient.of(request)
    readings = await asyncio.gather(*(_read(client, runtime) for runtime in models.all))
    return Response(generate_latest(Readings(readings)), media_type=TEXT)


async def _read(client: AdminClient, runtime: RuntimeClient) -> Reading:
    stats = None
    try:
        async with asyncio.timeout(SCRAPE_S):
            stats = await client.request(runtime, GetStats(of_entries=False), Stats)
    except (ServerError, TimeoutError):
        pass  # shown as a model that is not up
    process = runtime.supervisor
    return Reading(runtime.name, process.restarts, process.watchdog.fired, runtime.turns, stats)


class Readings(Collector):
    """All figures, labelled by model."""

    def __init__(self, readings: Sequence[Reading]) -> None:
        self._readings = readings
        self._stats = [(each.model, each.stats) for each in readings if each.stats is not None]

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("rekindle_up", "Whether the model answers.", labels=["model"])
        restarts = CounterMetricFamily(
            "rekindle_runtime_restarts", "Times the model's process was replaced.", labels=["model"]
        )
        stuck = CounterMetricFamily(
            "rekindle_watchdog_fired",
            "Times the model's process was replaced because it made no progress.",
            labels=["model"],
        )
        turns = GaugeMetricFamily(
            "rekindle_open_turns",
            "Turns that have not ended, those that are still to be encoded included.",
            labels=["model"],
        )
        for reading in self._readings:
            turns.add_metric([reading.model], reading.open_turns)
            up.add_metric([reading.model], reading.stats is not None)
            restarts.add_metric([reading.model], reading.restarts)
            stuck.add_metric([reading.model], reading.watchdog_fired)
        yield from (up, restarts, stuck, turns)
        for field, what in GAUGES.items():
            yield self._filled(
                GaugeMetricFamily(f"rekindle_{field}", what, labels=["model"]), field
            )
        for field, what in COUNTERS.items():
            family = CounterMetricFamily(f"rekindle_{field}", what, labels=["model"])
            yield self._filled(family, field)
        yield from self._disk()

    def _filled(
        self, family: GaugeMetricFamily | CounterMetricFamily, field: str
    ) -> GaugeMetricFamily | CounterMetricFamily:
        for model, stats in self._stats:
            family.add_metric([model], getattr(stats, field))
        return family

    def _disk(self) -> Iterator[Metric]:
        degraded = GaugeMetricFamily(
            "rekindle_disk_degraded",
            "Whether state that should be written to disk is not.",
            labels=["model"],
        )
        state = InfoMetricFamily(
            "rekindle_disk_state", "How the disk tier is, and why.", labels=["model"]
        )
        for model, stats in self._stats:
            degraded.add_metric([model], stats.disk_state not in HEALTHY_DISK_STATES)
            state.add_metric([model], {"state": stats.disk_state})
        yield from (degraded, state)
