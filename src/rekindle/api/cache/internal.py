"""Serves /v1/internal/model/kv_cache: the sessions of one model, by id.

Even an admin sees only its own sessions. An id does not contain its tenant, so that an admin's
`remove_cache` would remove session 7 of every tenant. Admins can use cache keys instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from fastapi import APIRouter
from pydantic import BaseModel, Field
from starlette.requests import Request

from rekindle.api.base.admin import AdminClient
from rekindle.api.base.fields import MAX_ID_CHARACTERS, SessionNumber, StrictModel, takes
from rekindle.api.base.loading import loaded
from rekindle.api.base.models import ModelNumber, models_of
from rekindle.api.cache.entries import MAX_PAGE_ENTRIES, RemovedBody, removed_fields
from rekindle.errors import NotFound
from rekindle.http.body import JsonRoute
from rekindle.protocol.admin import (
    EntryInfo,
    EntryList,
    ListEntries,
    Removed,
    RemoveOld,
    RemoveSession,
)
from rekindle.worker.client import RuntimeClient

NUMBERED = "kv_cache_session_id"
KINDS = (NUMBERED, "session_id", "message_id")

router = APIRouter(prefix="/v1/internal/model/kv_cache", route_class=JsonRoute, tags=["sessions"])

SessionId = Annotated[
    SessionNumber | Annotated[str, Field(min_length=1, max_length=MAX_ID_CHARACTERS)],
    takes(f"a whole number, or a string of 1 to {MAX_ID_CHARACTERS} characters"),
]


class RemoveRequest(StrictModel):
    session_id: SessionId


class RemoveOldRequest(StrictModel):
    seconds: float = Field(ge=0)


class Session(BaseModel):
    session_id: int | str
    kind: str
    size_bytes: int
    last_used: float


class Sessions(BaseModel):
    model: str
    caches: list[Session]
    count: int
    total_size_bytes: int  # an entry with several names counts once


class SessionRemoved(RemovedBody):
    session_id: int | str


@router.get("/info")
async def show_sessions(request: Request, number: ModelNumber = None) -> Sessions:
    """List sessions and messages whose state is kept, with its size."""
    runtime = await loaded(request, models_of(request).runtime(None, number))
    entries = await _all_entries(AdminClient.of_tenant(request), runtime)
    named = [(info, list(_sessions(info))) for info in entries]
    caches = [session for _, sessions in named for session in sessions]
    return Sessions(
        model=runtime.name,
        caches=caches,
        count=len(caches),
        total_size_bytes=sum(info.size_bytes for info, sessions in named if sessions),
    )


@router.post("/remove_cache", response_model_exclude_unset=True)
async def remove_session(
    body: RemoveRequest, request: Request, number: ModelNumber = None
) -> SessionRemoved:
    """Remove the state of one session."""
    runtime = await loaded(request, models_of(request).runtime(None, number))
    op = RemoveSession(body.session_id)
    removed = await AdminClient.of_tenant(request).request(runtime, op, Removed)
    if not removed.entries:
        raise NotFound(
            f"No state is kept under this id; GET {router.prefix}/info lists your sessions.",
            param="session_id",
        )
    return SessionRemoved(session_id=body.session_id, **removed_fields(removed))


@router.post("/remove_old_caches", response_model_exclude_unset=True)
async def remove_old(
    body: RemoveOldRequest, request: Request, number: ModelNumber = None
) -> RemovedBody:
    """Remove state that was not used for `seconds`, unless it is pinned."""
    runtime = await loaded(request, models_of(request).runtime(None, number))
    removed = await AdminClient.of_tenant(request).request(
        runtime, RemoveOld(body.seconds), Removed
    )
    return RemovedBody(**removed_fields(removed))


async def _all_entries(client: AdminClient, runtime: RuntimeClient) -> list[EntryInfo]:
    """All entries, least recently used first."""
    page = await client.request(runtime, ListEntries(limit=MAX_PAGE_ENTRIES), EntryList)
    entries = page.entries
    while page.next is not None:
        rest = ListEntries(limit=MAX_PAGE_ENTRIES, before=page.next)
        page = await client.request(runtime, rest, EntryList)
        entries += page.entries
    return entries[::-1]


def _sessions(info: EntryInfo) -> Iterator[Session]:
    """The ids of a session. Stored responses and conversations are not sessions, and other paths
    list and delete them."""
    for name in () if info.has_document else info.names:
        if name.kind in KINDS:
            yield Session(
                session_id=int(name.name) if name.kind == NUMBERED else name.name,
                kind=name.kind,
                size_bytes=info.size_bytes,
                last_used=info.last_used,
            )
