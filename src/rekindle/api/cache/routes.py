"""What can be done with the entries of the cache."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from msgspec import structs
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request

from rekindle.api.cache.schema import EntryBody, durability, entry_body
from rekindle.api.fields import FreeObject, Id
from rekindle.api.illustration import Illustrated, illustrate
from rekindle.api.media_parts import Resize
from rekindle.api.message import MOST_MESSAGES, Messages, rendered
from rekindle.api.tools import Tools, described
from rekindle.protocol.admin import (
    CollectExpired,
    DeleteEntry,
    EntryInfo,
    PinEntry,
    Removed,
    ShowEntry,
    Validate,
    Validation,
)
from rekindle.server.admin_client import AdminClient, refine_reason
from rekindle.server.json_route import JsonRoute, beside_loop
from rekindle.server.models import ModelNumber, models_of
from rekindle.server.responses import documented

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
        illustrated = Illustrated(await beside_loop(request, rendered, body.messages), [])
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
