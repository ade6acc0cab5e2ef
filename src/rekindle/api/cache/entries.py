"""What can be done with the entries of the cache."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Sequence
from heapq import merge
from itertools import islice
from typing import Annotated, Any

from fastapi import APIRouter, Query
from msgspec import structs
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request

from rekindle.api.base.admin import AdminClient, refine_reason
from rekindle.api.base.fields import FreeObject, Id
from rekindle.api.base.images import Illustrated, illustrate
from rekindle.api.base.messages import MOST_MESSAGES, Messages, Resize, rendered
from rekindle.api.base.models import ModelNumber, models_of
from rekindle.api.base.tools import Tools, described
from rekindle.errors import BadRequest
from rekindle.http.body import JsonRoute, run_off_loop
from rekindle.http.responses import documented
from rekindle.protocol.admin import (
    CollectExpired,
    DeleteEntry,
    EntryInfo,
    EntryList,
    ListEntries,
    PinEntry,
    Removed,
    ShowEntry,
    Validate,
    Validation,
)

# ----------------------------------------------------------------------
# An entry of the cache as clients see it.


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


router = APIRouter(route_class=JsonRoute, tags=["cache"])


class ValidateRequest(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())

    cache_key: Id
    model: str | None = None
    messages: Messages = Field(min_length=1, max_length=MOST_MESSAGES)
    tools: Tools | None = None
    resize: Resize | None = None
    chat_template_kwargs: FreeObject | None = None


class ValidityBody(BaseModel):
    """Whether a key would be hit, and where the messages differ from its entry."""

    status: str
    reusable_tokens: int
    invalidated_at: str | None
    reason: str
    diverged_at: dict[str, Any] | None = None


class Evicted(BaseModel):
    status: str
    cache_key: str
    durable: bool = True


class Collected(BaseModel):
    status: str
    removed: int
    freed_bytes: int
    durable: bool = True


@router.post("/v1/cache/validate", response_model_exclude_unset=True)
async def validate(
    body: ValidateRequest, request: Request, number: ModelNumber = None
) -> ValidityBody:
    """Would this key be hit by these messages? Changes nothing."""
    models = models_of(request)
    runtime = models.runtime(body.model, number)
    client = AdminClient.of_tenant(request)
    illustrated = await illustrate(request, runtime, body.messages, body.resize)
    if illustrated is None:
        illustrated = Illustrated(await run_off_loop(request, rendered, body.messages), [])
    op = Validate(
        cache_key=body.cache_key,
        messages=illustrated.messages,
        pictures=illustrated.pictures,
        tools=described(body.tools),
        template_kwargs=body.chat_template_kwargs or {},
        normalise=models.config.normalise,
    )
    result = structs.asdict(await client.request(runtime, op, Validation))
    result["reason"] = await refine_reason(
        result["reason"], body.cache_key, models.others(runtime), client.salt
    )
    diverged_at = result.pop("diverged_at")
    if diverged_at is not None:
        result["diverged_at"] = structs.asdict(diverged_at)
    return ValidityBody(**result)


@router.post("/v1/cache/gc", response_model_exclude_unset=True)
async def collect(request: Request, number: ModelNumber = None) -> Collected:
    """Remove now what has expired."""
    models = models_of(request)
    client = AdminClient.of(request)
    removed = [
        await client.request(runtime, CollectExpired(), Removed)
        for runtime in models.chosen(number)
    ]
    return Collected(
        status="ok",
        removed=sum(each.entries for each in removed),
        freed_bytes=sum(each.freed_bytes for each in removed),
        **durability(*removed),
    )


@router.post(
    "/v1/cache/{key:path}/pin", response_model_exclude_unset=True, responses=documented(507)
)
async def pin(key: str, request: Request, number: ModelNumber = None) -> EntryBody:
    """Never evict this entry."""
    return await _entry(request, number, PinEntry(key, pinned=True))


@router.post("/v1/cache/{key:path}/unpin", response_model_exclude_unset=True)
async def unpin(key: str, request: Request, number: ModelNumber = None) -> EntryBody:
    """Let the entry expire and be evicted again."""
    return await _entry(request, number, PinEntry(key, pinned=False))


@router.get("/v1/cache/{key:path}", response_model_exclude_unset=True)
async def show_entry(key: str, request: Request, number: ModelNumber = None) -> EntryBody:
    """One entry; this does not count as a use of it."""
    return await _entry(request, number, ShowEntry(key))


@router.delete("/v1/cache/{key:path}", response_model_exclude_unset=True)
async def evict(key: str, request: Request, number: ModelNumber = None) -> Evicted:
    """Remove an entry."""
    models = models_of(request)
    client = AdminClient.of(request)
    _, removed = await client.find(models.chosen(number), DeleteEntry(key), Removed)
    return Evicted(status="evicted", cache_key=key, **durability(removed))


async def _entry(request: Request, number: str | None, op: ShowEntry | PinEntry) -> EntryBody:
    models = models_of(request)
    client = AdminClient.of(request)
    runtime, info = await client.find(models.chosen(number), op, EntryInfo)
    return entry_body(info, runtime.name, admin=client.is_admin)


# ----------------------------------------------------------------------
# GET /v1/cache: the entries, a page at a time.

PAGE_ENTRIES = 100
MOST_PAGE_ENTRIES = 1000
AT_END = 0  # a position that nothing is below

_CURSOR = re.compile(r"\d{1,18}(\.\d{1,18})*")

listing_router = APIRouter(tags=["cache"])

Limit = Annotated[
    int, Query(ge=1, le=MOST_PAGE_ENTRIES, description="How many entries a page has at most.")
]
After = Annotated[str | None, Query(description="`next` of the page before; none: the first page.")]


class Listing(BaseModel):
    """A page of entries; with `has_more`, the next one is `?after=` its `next`."""

    entries: list[EntryBody]
    count: int  # in this page
    has_more: bool
    next: str | None


@listing_router.get("/v1/cache", response_model_exclude_unset=True)
async def list_entries(
    request: Request, number: ModelNumber = None, limit: Limit = PAGE_ENTRIES, after: After = None
) -> Listing:
    """The entries of all models, or of the numbered one; most recently used first."""
    models = models_of(request)
    client = AdminClient.of(request)
    runtimes = models.chosen(number)
    positions = _positions(after, len(runtimes))
    pages = await asyncio.gather(
        *(
            client.request(runtime, ListEntries(limit=limit, before=position), EntryList)
            for runtime, position in zip(runtimes, positions, strict=True)
        )
    )
    listed = _merged(pages, limit)
    taken = Counter(place for place, _ in listed)
    rest = [_position(page, taken[place]) for place, page in enumerate(pages)]
    has_more = any(position != AT_END for position in rest)
    return Listing(
        entries=[
            entry_body(info, runtimes[place].name, admin=client.is_admin) for place, info in listed
        ],
        count=len(listed),
        has_more=has_more,
        next=".".join(map(str, rest)) if has_more else None,
    )


def _merged(pages: Sequence[EntryList], limit: int) -> list[tuple[int, EntryInfo]]:
    """The first entries of all pages together, each with the number of its page; those of one page
    stay in its order."""
    numbered = ([(place, info) for info in page.entries] for place, page in enumerate(pages))
    return list(islice(merge(*numbered, key=lambda each: -each[1].last_used), limit))


def _position(page: EntryList, taken: int) -> int:
    """From where on the next page goes on, after so many of this one."""
    if taken < len(page.entries):
        return page.entries[taken].lru_position + 1
    return AT_END if page.next is None else page.next


def _positions(after: str | None, count: int) -> Sequence[int | None]:
    """Where each model's entries go on; None: from the top."""
    if after is None:
        return [None] * count
    parts = after.split(".") if _CURSOR.fullmatch(after[:4096]) else []
    if len(parts) != count:
        raise BadRequest("`after` takes the `next` of the page before this one.", param="after")
    return [int(part) for part in parts]
