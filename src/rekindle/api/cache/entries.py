"""Serves /v1/cache: lists, shows, validates, pins and evicts entries, and shows their tree."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from heapq import merge
from itertools import islice
from typing import Annotated, Any

from fastapi import APIRouter, Query
from msgspec import structs, to_builtins
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request

from rekindle.api.base.admin import AdminClient, durability, refine_reason, tenant_names
from rekindle.api.base.fields import MAX_ITEMS, FreeObject, Id, StrictModel
from rekindle.api.base.loading import chosen, loaded
from rekindle.api.base.messages import Messages, Resize
from rekindle.api.base.models import ModelNumber, models_of
from rekindle.api.base.request import render_chat
from rekindle.api.base.tools import ChatTools, described
from rekindle.errors import BadRequest
from rekindle.http.body import JsonRoute
from rekindle.http.responses import documented
from rekindle.protocol.admin import (
    BranchText,
    CollectExpired,
    DeleteEntry,
    EntryInfo,
    EntryList,
    ListEntries,
    PinEntry,
    PrefixTree,
    Removed,
    ShowBranch,
    ShowEntry,
    ShowTree,
    Validate,
    Validation,
)

MAX_PAGE_ENTRIES = 1000
MAX_BRANCHES = 5000
AT_END = 0  # a position before which there are no entries

router = APIRouter(route_class=JsonRoute, tags=["cache"])
listing_router = APIRouter(tags=["cache"])


class SegmentBody(BaseModel):
    model_config = ConfigDict(from_attributes=True)

    type: str
    hash: str


class NameBody(BaseModel):
    model_config = ConfigDict(from_attributes=True)

    kind: str
    name: str


class EntryBody(BaseModel):
    """An entry: its conversation, tier, size and lifetime."""

    cache_key: str
    model: str
    segments: list[SegmentBody]
    token_count: int
    stored_tokens: int  # tokens that survive a restart
    tier: str | None
    size_bytes: int
    hit_count: int
    pinned: bool
    ttl: float | None
    created_at: float
    last_used: float
    expires_at: float | None
    names: list[NameBody]
    preview: str  # the start of its last user message; empty for other tenants
    tenant: str | None = None  # its name, or an id if it has no key; only admins see it
    durable: bool = True  # shown only if false


class Prepared(BaseModel):
    cache_key: str
    model: str
    token_count: int
    size_bytes: int
    segments: list[SegmentBody]
    durable: bool = True


def entry_fields(
    info: EntryInfo, model: str, tenants: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """`tenants` are the names of tenants by id, for an admin. None: the tenant is not shown."""
    hidden = ("durable", "tenant")
    fields = {name: value for name, value in structs.asdict(info).items() if name not in hidden}
    if tenants is not None:
        fields["tenant"] = tenants.get(info.tenant, info.tenant)
    return {**fields, **durability(info), "model": model}


class ValidateRequest(StrictModel):
    cache_key: Id
    model: str | None = None
    messages: Messages = Field(min_length=1, max_length=MAX_ITEMS)
    tools: ChatTools | None = None
    resize: Resize | None = None
    chat_template_kwargs: FreeObject | None = None


class ValidityBody(BaseModel):
    """Whether the messages would hit the entry, and where they differ from it."""

    status: str
    reusable_tokens: int
    invalidated_at: str | None
    reason: str
    diverged_at: dict[str, Any] | None = None


class Evicted(BaseModel):
    status: str
    cache_key: str
    durable: bool = True


class RemovedBody(BaseModel):
    status: str
    removed: int
    freed_bytes: int
    durable: bool = True


def removed_fields(*removed: Removed) -> dict[str, Any]:
    return {
        "status": "ok",
        "removed": sum(each.entries for each in removed),
        "freed_bytes": sum(each.freed_bytes for each in removed),
        **durability(*removed),
    }


@router.post("/v1/cache/validate", response_model_exclude_unset=True)
async def validate(
    body: ValidateRequest, request: Request, number: ModelNumber = None
) -> ValidityBody:
    """Tell whether these messages would hit the entry. Changes nothing."""
    models = models_of(request)
    runtime = await loaded(request, models.runtime(body.model, number))
    client = AdminClient.of_tenant(request)
    chat = await render_chat(request, runtime, body.messages, body.resize)
    op = Validate(
        **chat.fields,
        cache_key=body.cache_key,
        tools=described(body.tools),
        template_kwargs=body.chat_template_kwargs or {},
        normalise=models.config.normalise,
    )
    result = await client.request(runtime, op, Validation)
    result.reason = await refine_reason(
        result.reason, body.cache_key, models.others(runtime), client.salt
    )
    fields = to_builtins(result)
    if result.diverged_at is None:
        del fields["diverged_at"]
    return ValidityBody(**fields)


@router.post("/v1/cache/gc", response_model_exclude_unset=True)
async def collect(request: Request, number: ModelNumber = None) -> RemovedBody:
    """Remove expired entries now."""
    client, runtimes = AdminClient.of(request), await chosen(request, number)
    removed = [await client.request(runtime, CollectExpired(), Removed) for runtime in runtimes]
    return RemovedBody(**removed_fields(*removed))


@router.post(
    "/v1/cache/{key:path}/pin", response_model_exclude_unset=True, responses=documented(507)
)
async def pin(key: str, request: Request, number: ModelNumber = None) -> EntryBody:
    """Pin an entry, so that it is never evicted."""
    return await _entry(request, number, PinEntry(key, pinned=True))


@router.post("/v1/cache/{key:path}/unpin", response_model_exclude_unset=True)
async def unpin(key: str, request: Request, number: ModelNumber = None) -> EntryBody:
    """Unpin an entry, so that it can expire and be evicted."""
    return await _entry(request, number, PinEntry(key, pinned=False))


@router.get("/v1/cache/{key:path}", response_model_exclude_unset=True)
async def show_entry(key: str, request: Request, number: ModelNumber = None) -> EntryBody:
    """Show an entry. This does not count as a use."""
    return await _entry(request, number, ShowEntry(key))


@router.delete("/v1/cache/{key:path}", response_model_exclude_unset=True)
async def evict(key: str, request: Request, number: ModelNumber = None) -> Evicted:
    """Remove an entry."""
    runtimes = await chosen(request, number)
    _, removed = await AdminClient.of(request).find(runtimes, DeleteEntry(key), Removed)
    return Evicted(status="evicted", cache_key=key, **durability(removed))


async def _entry(request: Request, number: str | None, op: ShowEntry | PinEntry) -> EntryBody:
    client = AdminClient.of(request)
    runtime, info = await client.find(await chosen(request, number), op, EntryInfo)
    tenants = await tenant_names(request, runtime) if client.is_admin else None
    return EntryBody(**entry_fields(info, runtime.name, tenants))


Limit = Annotated[
    int, Query(ge=1, le=MAX_PAGE_ENTRIES, description="Largest number of entries in a page.")
]
After = Annotated[str | None, Query(description="`next` of the previous page.")]


class Listing(BaseModel):
    """A page of entries. If `has_more`, `?after=` its `next` is the next page."""

    entries: list[EntryBody]
    count: int  # in this page
    has_more: bool
    next: str | None


@listing_router.get("/v1/cache", response_model_exclude_unset=True)
async def list_entries(
    request: Request, number: ModelNumber = None, limit: Limit = 100, after: After = None
) -> Listing:
    """List the entries of all models, or of the numbered one, most recently used first."""
    client, runtimes = AdminClient.of(request), await chosen(request, number)
    ops = [ListEntries(limit=limit, before=each) for each in _positions(after, len(runtimes))]
    asked = (client.request(*each, EntryList) for each in zip(runtimes, ops, strict=True))
    pages = await asyncio.gather(*asked)
    names: list[Mapping[str, str] | None] = [None] * len(runtimes)
    if client.is_admin:
        names = list(await asyncio.gather(*(tenant_names(request, each) for each in runtimes)))
    listed = _merged(pages, limit)
    taken = Counter(place for place, _ in listed)
    rest = [_position(page, taken[place]) for place, page in enumerate(pages)]
    has_more = any(position != AT_END for position in rest)
    return Listing(
        entries=[
            EntryBody(**entry_fields(info, runtimes[place].name, names[place]))
            for place, info in listed
        ],
        count=len(listed),
        has_more=has_more,
        next=".".join(map(str, rest)) if has_more else None,
    )


def _merged(pages: Sequence[EntryList], limit: int) -> list[tuple[int, EntryInfo]]:
    """Merge the models' pages by last use. Each entry comes with the number of its page."""
    numbered = ([(place, info) for info in page.entries] for place, page in enumerate(pages))
    return list(islice(merge(*numbered, key=lambda each: -each[1].last_used), limit))


def _position(page: EntryList, taken: int) -> int:
    """Where the next page continues after `taken` entries of this one."""
    if taken < len(page.entries):
        return page.entries[taken].lru_position + 1
    return AT_END if page.next is None else page.next


def _positions(after: str | None, count: int) -> Sequence[int | None]:
    """Parse the cursor: the position of each model, or None for the start."""
    if after is None:
        return [None] * count
    parts = after.split(".") if re.fullmatch(r"\d{1,18}(\.\d{1,18})*", after[:4096]) else []
    if len(parts) != count:
        raise BadRequest("`after` takes the `next` of the previous page.", param="after")
    return [int(part) for part in parts]


class BranchBody(BaseModel):
    """Consecutive blocks that the same conversations use."""

    model_config = ConfigDict(from_attributes=True)

    key: str
    parent: int | None  # its index in the list
    start: int  # number of tokens before it
    tokens: int
    size_bytes: int
    tier: str
    conversations: int


class TreeBody(BaseModel):
    """The stored prefixes of one model, parents first. A shared part occurs once."""

    model: str
    branches: list[BranchBody]
    is_complete: bool


class Trees(BaseModel):
    trees: list[TreeBody]


class BranchTextBody(BaseModel):
    text: str
    is_complete: bool


Branches = Annotated[
    int, Query(ge=1, le=MAX_BRANCHES, description="Largest number of branches for each model.")
]


@listing_router.get("/v1/cache/tree")
async def show_tree(request: Request, number: ModelNumber = None, limit: Branches = 1000) -> Trees:
    """Show how conversations share their stored prefixes, for all models or the numbered one."""
    client, trees = AdminClient.of(request), []
    for runtime in await chosen(request, number):
        tree = await client.request(runtime, ShowTree(limit=limit), PrefixTree)
        branches = [BranchBody.model_validate(each) for each in tree.branches]
        body = TreeBody(model=runtime.name, branches=branches, is_complete=tree.is_complete)
        trees.append(body)
    return Trees(trees=trees)


@listing_router.get("/v1/cache/tree/{key}")
async def show_branch(
    key: str, request: Request, model: str | None = None, number: ModelNumber = None
) -> BranchTextBody:
    """Show the text of a branch, as the model reads it. Other API keys' text is never shown."""
    client, runtime = AdminClient.of_tenant(request), models_of(request).runtime(model, number)
    shown = await client.request(runtime, ShowBranch(key), BranchText)
    return BranchTextBody(text=shown.text, is_complete=shown.is_complete)
