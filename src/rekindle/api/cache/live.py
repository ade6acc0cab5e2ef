"""Serves /v1/internal/live: what the server does now, as server-sent events.

Everybody who watches with the same rights gets the same snapshot, which is built once a second. The
figures of turns come from the events that the front sees anyway. The models' processes are asked
for their cache every five seconds only.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any

import orjson
from fastapi import APIRouter
from msgspec import structs
from starlette.requests import Request
from starlette.responses import Response

from rekindle.api.base.admin import AdminClient
from rekindle.api.base.models import ServedModels, models_of
from rekindle.errors import ServerError, TooManyRequests
from rekindle.http.responses import EventStream, SignOfLife, documented, sse_comment
from rekindle.protocol.admin import GetStats, Stats
from rekindle.worker.activity import Tally
from rekindle.worker.client import RuntimeClient

LIVE_FEED = "live_feed"  # in the state of requests
INTERVAL_S = 1.0
STATS_INTERVAL_S = 5.0
MAX_WATCHERS = 20  # with the same rights, so that no tenant keeps others from watching
SHOWN_TURNS = 50

router = APIRouter(tags=["cache"])


class Documented(Response):
    """The type of the answer, for the OpenAPI document."""

    media_type = "text/event-stream"


@dataclass(slots=True)
class _Known:
    """The last snapshot for one view, and when it was built."""

    built_s: float
    event: bytes
    stats: dict[str, Stats]
    asked_s: float


class LiveFeed:
    """Builds snapshots for tenants, who see their own turns, and for admins, who see all."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: dict[bytes | None, _Known] = {}
        self._locks: dict[bytes | None, asyncio.Lock] = {}
        self._watchers: dict[bytes | None, int] = {}

    async def watch(self, models: ServedModels, client: AdminClient) -> AsyncGenerator[bytes, None]:
        """Yield a snapshot whenever it has changed."""
        view = _view_of(client)
        self._watchers[view] = self._watchers.get(view, 0) + 1
        sent = b""
        try:
            while True:
                event = await self._event(models, client, view)
                if event != sent:
                    yield event
                    sent = event
                await asyncio.sleep(INTERVAL_S)
        finally:
            self._leave(view)

    def check_room(self, client: AdminClient) -> None:
        """Raise TooManyRequests if too many clients watch with the same rights."""
        if self._watchers.get(_view_of(client), 0) >= MAX_WATCHERS:
            raise TooManyRequests(
                f"{MAX_WATCHERS} clients already watch with this key; close a console and try again"
            )

    def _leave(self, view: bytes | None) -> None:
        self._watchers[view] -= 1
        if not self._watchers[view]:
            del self._watchers[view]
            self._known.pop(view, None)
            self._locks.pop(view, None)

    async def _event(self, models: ServedModels, client: AdminClient, view: bytes | None) -> bytes:
        async with self._locks.setdefault(view, asyncio.Lock()):
            now_s = self._clock()
            known = self._known.get(view)
            if known is not None and now_s - known.built_s < INTERVAL_S / 2:
                return known.event
            stats, asked_s = (known.stats, known.asked_s) if known else ({}, -STATS_INTERVAL_S)
            if known is None or now_s - asked_s >= STATS_INTERVAL_S:
                stats, asked_s = await _stats_of(models, client), now_s
            snapshot = {
                "problem": models.problem,
                "models": [_model(models, each, stats.get(each.name), view) for each in models.all],
            }
            event = b"event: snapshot\ndata: " + orjson.dumps(snapshot) + b"\n\n"
            self._known[view] = _Known(now_s, event, stats, asked_s)
            return event


def _view_of(client: AdminClient) -> bytes | None:
    """The tenant whose turns a client may see, or None for an admin, who sees all."""
    return None if client.is_admin else client.salt


async def _stats_of(models: ServedModels, client: AdminClient) -> dict[str, Stats]:
    """The figures of every model that answers."""
    found = {}
    for runtime in models.runtimes:
        with contextlib.suppress(ServerError, TimeoutError):
            async with asyncio.timeout(INTERVAL_S):
                found[runtime.name] = await client.request(
                    runtime, GetStats(of_entries=False), Stats
                )
    return found


def _model(
    models: ServedModels, runtime: RuntimeClient, stats: Stats | None, view: bytes | None
) -> dict[str, Any]:
    described, activity = runtime.described, runtime.activity
    residence, token_s = models.pool.model(runtime), activity.token_s
    is_down = residence.is_loaded and runtime.ready is None
    return {
        "id": runtime.name,
        "status": residence.status,
        "loading": round(residence.fraction, 3) if residence.status == "loading" else None,
        "reason": runtime.supervisor.down_reason if is_down else residence.failure,
        "context_tokens": described.context_tokens if described else None,
        "modalities": list(described.modalities) if described else [],
        "generates": not models.is_embedder(runtime),
        "memory_bytes": residence.used_bytes,
        "restarts": runtime.supervisor.restarts,
        "prefill_tokens_per_s": round(1 / token_s, 1) if token_s else None,
        "running": activity.running(view)[:SHOWN_TURNS],
        "ended": activity.ended(view, SHOWN_TURNS),
        "saved": _saved(activity.tally(view)),
        "cache": structs.asdict(stats) if stats else None,
    }


def _saved(tally: Tally) -> dict[str, Any]:
    """What reuse has saved. The seconds are an estimate from the measured prefill speed."""
    prompt, reused = (sum(minute[place] for minute in tally.minutes) for place in (1, 2))
    return {
        "tokens": tally.saved_tokens,
        "seconds": round(tally.saved_s, 1),
        "share_of_last_hour": round(reused / prompt, 4) if prompt else None,
        "minutes": [list(minute) for minute in tally.minutes],
        "days": [
            {"day": day, "tokens": int(tokens), "seconds": round(seconds, 1)}
            for day, (tokens, seconds) in tally.days.items()
        ],
    }


@router.get("/v1/internal/live", response_class=Documented, responses=documented(429))
async def watch(request: Request) -> Response:
    """Watch the models: running and ended turns, what reuse saved, and the state of the cache.

    A snapshot is sent each second in which something has changed. An API key sees its own turns,
    an admin key sees all. No event contains text of a conversation.
    """
    feed: LiveFeed = getattr(request.state, LIVE_FEED)
    client = AdminClient.of(request)
    feed.check_room(client)
    chunks = feed.watch(models_of(request), client)
    sign = SignOfLife(3.0, lambda: sse_comment("no change"))
    return EventStream(chunks, lambda: None, sign_of_life=sign)
