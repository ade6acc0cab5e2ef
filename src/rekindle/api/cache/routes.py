"""GET /v1/cache and what can be done with its entries."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from msgspec import structs
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request

from rekindle.api.cache.mismatch import reason_for
from rekindle.api.cache.questions import Questions
from rekindle.api.cache.schema import EntryBody, Listing, entry_body
from rekindle.api.openai.fields import FreeObject, Id
from rekindle.api.openai.message import Messages, rendered
from rekindle.api.openai.schema import MOST_MESSAGES
from rekindle.api.openai.tool import Tools, described
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
from rekindle.server.json import OrjsonRoute
from rekindle.server.service import ModelNumber, Service

router = APIRouter(route_class=OrjsonRoute, tags=["cache"])


class ValidateRequest(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())

    cache_key: Id
    model: str | None = None
    messages: Messages = Field(min_length=1, max_length=MOST_MESSAGES)
    tools: Tools | None = None
    chat_template_kwargs: FreeObject | None = None


class ValidityBody(BaseModel):
    """Whether a key would be hit, and where the messages leave what it stands for."""

    status: str
    reusable_tokens: int
    invalidated_at: str | None
    reason: str
    diverged_at: dict[str, Any] | None = None


class Evicted(BaseModel):
    status: str = "evicted"
    cache_key: str


class Collected(BaseModel):
    status: str = "ok"
    removed: int
    freed_bytes: int


@router.get("/v1/cache", response_model_exclude_unset=True)
async def list_entries(request: Request, number: ModelNumber = None) -> Listing:
    """The entries of all models, or of the numbered one; those used last come first."""
    service: Service = request.state.service
    questions = Questions.of(request)
    found = [
        entry_body(info, runtime.name, admin=questions.admin)
        for runtime in service.chosen(number)
        for info in (await questions.ask(runtime, ListEntries(), EntryList)).entries
    ]
    found.sort(key=lambda entry: entry.last_used, reverse=True)
    return Listing(entries=found, count=len(found))


@router.post("/v1/cache/validate", response_model_exclude_unset=True)
async def validate(
    body: ValidateRequest, request: Request, number: ModelNumber = None
) -> ValidityBody:
    """Would this key be hit by these messages? Asking changes nothing."""
    service: Service = request.state.service
    runtime = service.runtime(body.model, number)
    questions = Questions.of_tenant(request)
    question = Validate(
        cache_key=body.cache_key,
        messages=rendered(body.messages),
        tools=described(body.tools),
        template_kwargs=body.chat_template_kwargs or {},
        normalise=service.config.normalise,
    )
    told = structs.asdict(await questions.ask(runtime, question, Validation))
    told["reason"] = await reason_for(
        told["reason"], body.cache_key, service.others(runtime), questions.salt
    )
    diverged_at = told.pop("diverged_at")
    if diverged_at is not None:
        told["diverged_at"] = structs.asdict(diverged_at)
    return ValidityBody(**told)


@router.post("/v1/cache/gc")
async def collect(request: Request, number: ModelNumber = None) -> Collected:
    """Remove now what has expired."""
    service: Service = request.state.service
    questions = Questions.of(request)
    removed = [
        await questions.ask(runtime, CollectExpired(), Removed)
        for runtime in service.chosen(number)
    ]
    return Collected(
        removed=sum(each.entries for each in removed),
        freed_bytes=sum(each.freed_bytes for each in removed),
    )


@router.post("/v1/cache/{key:path}/pin", response_model_exclude_unset=True)
async def pin(key: str, request: Request, number: ModelNumber = None) -> EntryBody:
    """Keep an entry whatever else needs its room."""
    return await _entry(request, number, PinEntry(key, pinned=True))


@router.post("/v1/cache/{key:path}/unpin", response_model_exclude_unset=True)
async def unpin(key: str, request: Request, number: ModelNumber = None) -> EntryBody:
    """Let an entry go when its time comes."""
    return await _entry(request, number, PinEntry(key, pinned=False))


@router.get("/v1/cache/{key:path}", response_model_exclude_unset=True)
async def show_entry(key: str, request: Request, number: ModelNumber = None) -> EntryBody:
    """One entry; looking does not count as use."""
    return await _entry(request, number, ShowEntry(key))


@router.delete("/v1/cache/{key:path}")
async def evict(key: str, request: Request, number: ModelNumber = None) -> Evicted:
    """Forget an entry."""
    service: Service = request.state.service
    await Questions.of(request).find(service.chosen(number), DeleteEntry(key), Removed)
    return Evicted(status="evicted", cache_key=key)


async def _entry(request: Request, number: str | None, op: ShowEntry | PinEntry) -> EntryBody:
    service: Service = request.state.service
    questions = Questions.of(request)
    runtime, info = await questions.find(service.chosen(number), op, EntryInfo)
    return entry_body(info, runtime.name, admin=questions.admin)
