"""Serves /v1/cache/prepare: computes the state of a prompt before its first use."""

from __future__ import annotations

import contextlib
from typing import Annotated

from fastapi import APIRouter
from pydantic import Field, model_validator
from starlette.requests import Request

from rekindle.api.base.admin import AdminClient
from rekindle.api.base.fields import KvBits, KvGroupSize, KvStart, StrictModel, count_characters
from rekindle.api.base.loading import loaded
from rekindle.api.base.messages import Messages, Resize, rendered
from rekindle.api.base.models import ModelNumber, models_of
from rekindle.api.base.reply import Turns
from rekindle.api.base.request import RequestBuilder, render_chat
from rekindle.api.base.tools import ChatTools, described
from rekindle.api.cache.entries import Prepared, entry_fields
from rekindle.errors import BadRequest, CacheKeyNotFound, Forbidden, ServerError, Unsupported
from rekindle.http.auth import caller_of
from rekindle.http.body import JsonRoute
from rekindle.http.key_file import NAME
from rekindle.http.responses import documented, while_connected
from rekindle.protocol.admin import EntryInfo, Flush, IndexPrompt
from rekindle.protocol.events import Finished
from rekindle.protocol.requests import GenerateRequest, Prepare
from rekindle.worker.client import RuntimeClient

MAX_CHARACTERS = 200_000
Group = Annotated[str, Field(pattern=f"^{NAME}$")]

router = APIRouter(route_class=JsonRoute, tags=["cache"])


class PrepareRequest(StrictModel):
    model: str | None = None
    messages: Messages = Field(min_length=1, max_length=200)
    tools: ChatTools | None = None
    resize: Resize | None = None
    warm: bool = True
    pinned: bool = False
    ttl: float | None = Field(
        1800.0,
        gt=0,
        le=10 * 365 * 86_400.0,
        description="Seconds after the last use. A pinned entry never expires without it.",
    )
    shared: bool | Group = Field(
        False,
        description="Let all tenants reuse the state, or those of the group with this name. Needs "
        "an admin key.",
    )
    kv_bits: KvBits | None = None
    kv_group_size: KvGroupSize | None = None
    kv_quantization_start: KvStart | None = None

    @model_validator(mode="after")
    def _ends_or_is_pinned(self) -> PrepareRequest:
        if self.ttl is None and not self.pinned:
            raise BadRequest(
                "`ttl` takes a number of seconds. Null, which means never, needs `pinned: true`.",
                param="ttl",
            )
        return self

    @model_validator(mode="after")
    def _bounded_text(self) -> PrepareRequest:
        found = count_characters([rendered(self.messages), described(self.tools)])
        if found > MAX_CHARACTERS:
            raise BadRequest(
                f"`messages` and `tools` may have {MAX_CHARACTERS} characters of text together; "
                f"these have {found}.",
                param="messages",
            )
        return self

    @property
    def prepare(self) -> Prepare:
        is_endless = self.pinned and "ttl" not in self.model_fields_set
        ttl_s = None if is_endless else self.ttl
        return Prepare(pinned=self.pinned, ttl_s=ttl_s, shared=self.shared)


@router.post(
    "/v1/cache/prepare", response_model_exclude_unset=True, responses=documented(403, 409, 507)
)
async def prepare(body: PrepareRequest, request: Request, number: ModelNumber = None) -> Prepared:
    """Compute the start of a prompt, or with `warm: false` only index it."""
    models = models_of(request)
    if not models.config.context_cache:
        raise Unsupported("this server reuses nothing: it was started without --context-cache")
    runtime = await loaded(request, models.runtime(body.model, number))
    client = AdminClient.of_tenant(request)
    if body.shared is not False:
        client = _sharing(body, request)
    chat = await render_chat(request, runtime, body.messages, body.resize)
    prompt = {
        **chat.fields,
        "tools": described(body.tools),
        "prepare": body.prepare,
    }
    if body.warm:
        turn = RequestBuilder(models.config, caller_of(request)).build(
            **prompt,
            max_tokens=1,
            kv_bits=body.kv_bits,
            kv_group_size=body.kv_group_size,
            kv_quantization_start=body.kv_quantization_start,
        )
        work = _warm(runtime, client, turn)
    else:
        op = IndexPrompt(**prompt, normalise=models.config.normalise)
        work = client.request(runtime, op, EntryInfo)
    info = await while_connected(request, work)
    return Prepared(**entry_fields(info, runtime.name))


def _sharing(body: PrepareRequest, request: Request) -> AdminClient:
    """Check a request for shared state. Nobody owns such state, so an admin has to look it up."""
    if not caller_of(request).admin:
        raise Forbidden("Only an admin key may share a prompt with other tenants.")
    if not body.warm:
        raise BadRequest("A shared prompt is computed at once: leave `warm` out.", param="warm")
    return AdminClient.of(request)


async def _warm(runtime: RuntimeClient, client: AdminClient, turn: GenerateRequest) -> EntryInfo:
    """Compute the prompt and wait until its state is written."""
    with contextlib.closing(Turns(runtime, [turn])) as turns:
        while turns.open:
            _, event = await turns.next()
    assert isinstance(event, Finished)
    if event.cache.new_cache_key is None:
        raise ServerError("the prompt was computed, but its state could not be kept")
    try:
        info = await client.request(runtime, Flush(event.cache.new_cache_key), EntryInfo)
    except ServerError as error:
        if error.code != CacheKeyNotFound.code:
            raise
        raise RemovedMeanwhile(
            "The prompt was computed, but its entry was removed before it was written, by another "
            "request or to make room. Prepare it again."
        ) from None
    if info.held_tokens < info.token_count:
        raise NoRoom(
            f"The prompt was computed, but of its {info.token_count} tokens only "
            f"{info.held_tokens} could be kept. Raise --ram-cache or --disk-cache."
        )
    return info


class RemovedMeanwhile(ServerError):
    status, kind, code = 409, "invalid_request_error", "removed_meanwhile"


class NoRoom(ServerError):
    status, kind, code = 507, "insufficient_storage_error", "no_room"
