"""Serves GET /metrics: the statistics of every model, for Prometheus."""

from __future__ import annotations

import asyncio
import os
import platform
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from fastapi import APIRouter
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import generate_latest
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from rekindle.api.base.admin import AdminClient
from rekindle.api.base.models import models_of
from rekindle.errors import Forbidden, ServerError
from rekindle.front.health import problems_of
from rekindle.front.request_metrics import REQUEST_METRICS, RequestMetrics
from rekindle.http.auth import caller_of
from rekindle.http.responses import documented
from rekindle.protocol.admin import HEALTHY_DISK_STATES, GetStats, Stats
from rekindle.version import __version__
from rekindle.worker.client import RuntimeClient

#: Fields of Stats, and their descriptions.
GAUGES = {
    "active_turns": "Turns waiting and running.",
    "ram_bytes": "State in memory.",
    "ram_limit_bytes": "Limit for state in memory.",
    "disk_bytes": "State on disk.",
    "disk_limit_bytes": "Limit for state on disk.",
    "disk_queued_bytes": "State waiting to be written to disk.",
    "picture_ram_bytes": "Encoded images in memory.",
    "picture_disk_bytes": "Encoded images on disk.",
}
COUNTERS = {
    "computed_tokens": "Computed tokens of prompts and replies.",
    "reused_tokens": "Prompt tokens that were reused.",
    "hits": "Turns that reused everything they could.",
    "partial_hits": "Turns that reused part of what they could.",
    "misses": "Turns that reused no message content.",
    "disk_written_bytes": "State written to disk.",
    "disk_read_bytes": "State read from disk.",
    "evictions": "Evicted blocks.",
    "corrupt_blocks": "Stored blocks that failed their check.",
    "encoded_pictures": "Images encoded by the projector.",
    "picture_hits": "Images whose encoding was reused.",
}

RUNNING = "Turns whose prompt is being computed, or which generate."
WAITING = "Turns that wait to be encoded, or for a place in the batch."

_gauge = partial(GaugeMetricFamily, labels=["model"])
_counter = partial(CounterMetricFamily, labels=["model"])

router = APIRouter(tags=["metrics"])


@router.get("/metrics", response_class=PlainTextResponse, responses=documented(403))
async def show_metrics(request: Request) -> Response:
    """Metrics of all models in Prometheus' text format. With API keys, it needs an admin key."""
    if not caller_of(request).admin:
        raise Forbidden("Metrics cover all tenants, so this endpoint needs an admin key.")
    runtimes = models_of(request).all_loaded
    client = AdminClient.of(request)
    stats = await asyncio.gather(*(_stats(client, runtime) for runtime in runtimes))
    of_requests: RequestMetrics = getattr(request.state, REQUEST_METRICS)
    found = ModelMetrics(list(zip(runtimes, stats, strict=True)), of_requests)
    content = generate_latest(found)
    return Response(content, media_type="text/plain; version=0.0.4; charset=utf-8")


async def _stats(client: AdminClient, runtime: RuntimeClient) -> Stats | None:
    """Return None if the model does not answer in 5 s, half of Prometheus' scrape timeout."""
    try:
        async with asyncio.timeout(5):
            return await client.request(runtime, GetStats(of_entries=False), Stats)
    except (ServerError, TimeoutError):
        return None


class ModelMetrics(Collector):
    """All metrics: of the server, of its requests and of its models."""

    def __init__(
        self, models: Sequence[tuple[RuntimeClient, Stats | None]], requests: RequestMetrics
    ) -> None:
        self._models = models
        self._requests = requests
        self._stats = [(runtime.name, stats) for runtime, stats in models if stats is not None]

    def collect(self) -> Iterator[Metric]:
        build = InfoMetricFamily("rekindle_build", "Versions of the server and of Python.")
        versions = {"version": __version__, "python": platform.python_version()}
        build.add_metric([], versions)
        yield build
        yield from ProcessCollector(registry=None).collect()
        yield from self._requests.collect()
        yield from self._of_processes()
        yield from self._of_stats()

    def _of_processes(self) -> Iterator[Metric]:
        up = _gauge("rekindle_up", "Whether the model answers.")
        restarts = _counter("rekindle_runtime_restarts", "Restarts of the model's process.")
        stuck = _counter(
            "rekindle_watchdog_fired", "Restarts because the process made no progress."
        )
        turns = _gauge(
            "rekindle_open_turns", "Turns that have not ended, including those being encoded."
        )
        memory = _gauge("rekindle_model_resident_memory_bytes", "Memory of the model's process.")
        problem = GaugeMetricFamily(
            "rekindle_problem", "A problem that /health names.", labels=["model", "code"]
        )
        waits = [
            (_gauge("rekindle_num_requests_running", RUNNING), True),
            (_gauge("rekindle_num_requests_waiting", WAITING), False),
            (GaugeMetricFamily("vllm:num_requests_running", RUNNING, labels=["model_name"]), True),
            (GaugeMetricFamily("vllm:num_requests_waiting", WAITING, labels=["model_name"]), False),
        ]
        for runtime, stats in self._models:
            model = [runtime.name]
            running = runtime.running_turns
            for family, is_running in waits:
                family.add_metric(model, running if is_running else runtime.turns - running)
            if (size := resident_bytes(runtime.supervisor.pid)) is not None:
                memory.add_metric(model, size)
            for each in problems_of(runtime):
                problem.add_metric([each["model"], each["code"]], 1)
            up.add_metric(model, stats is not None)
            restarts.add_metric(model, runtime.supervisor.restarts)
            stuck.add_metric(model, runtime.supervisor.watchdog.fired)
            turns.add_metric(model, runtime.turns)
        yield from (up, restarts, stuck, turns, memory, problem)
        yield from (family for family, _ in waits)

    def _of_stats(self) -> Iterator[Metric]:
        degraded = _gauge(
            "rekindle_disk_degraded", "Whether state is not written to disk as it should be."
        )
        state = InfoMetricFamily("rekindle_disk_state", "State of the disk tier.", labels=["model"])
        for name, stats in self._stats:
            degraded.add_metric([name], stats.disk_state not in HEALTHY_DISK_STATES)
            state.add_metric([name], {"state": stats.disk_state})
        yield from (degraded, state)
        for make, texts in ((_gauge, GAUGES), (_counter, COUNTERS)):
            for field, text in texts.items():
                family = make(f"rekindle_{field}", text)
                for name, stats in self._stats:
                    family.add_metric([name], getattr(stats, field))
                yield family


def resident_bytes(pid: int | None) -> int | None:
    """The memory of a process. None if it is gone, or the system has no /proc."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")
