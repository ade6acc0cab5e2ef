"""POST /v1/cache/prepare: compute the state of a prompt's beginning before its first use."""

from __future__ import annotations

import contextlib

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.requests import Request

from rekindle.api.base.admin import AdminClient
from rekindle.api.base.fields import KvBits, KvGroupSize, KvStart, characters
from rekindle.api.base.images import Illustrated, illustrate
from rekindle.api.base.messages import Messages, Resize, rendered
from rekindle.api.base.models import ModelNumber, models_of
from rekindle.api.base.tools import Tools, described
from rekindle.api.base.turns import Turns, while_connected
from rekindle.api.cache.entries import Prepared, prepared
from rekindle.config import Config
from rekindle.errors import BadRequest, CacheKeyNotFound, ServerError, Unsupported
from rekindle.http.body import JsonRoute
from rekindle.http.responses import documented
from rekindle.protocol.admin import EntryInfo, Flush, IndexPrompt
from rekindle.protocol.events import Event, Finished
from rekindle.protocol.requests import GenerateRequest, Prepare, SamplingParams
from rekindle.worker.client import RuntimeClient

MOST_MESSAGES = 200
MOST_CHARACTERS = 200_000
TTL_S = 1800.0
MOST_TTL_S = 10 * 365 * 86_400.0

router = APIRouter(route_class=JsonRoute, tags=["cache"])


class PrepareRequest(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())

    model: str | None = None
    messages: Messages = Field(min_length=1, max_length=MOST_MESSAGES)
    tools: Tools | None = None
    resize: Resize | None = None
    warm: bool = True
    pinned: bool = False
    ttl: float | None = Field(TTL_S, gt=0, le=MOST_TTL_S)
    kv_bits: KvBits | None = None
    kv_group_size: KvGroupSize | None = None
    kv_quantization_start: KvStart | None = None

    @model_validator(mode="after")
    def _ends_or_is_pinned(self) -> PrepareRequest:
        if self.ttl is None and not self.pinned:
            raise BadRequest(
                "`ttl` takes a number of seconds; null, which is never, needs `pinned: true`.",
                param="ttl",
            )
        return self

    @model_validator(mode="after")
    def _bounded_text(self) -> PrepareRequest:
        found = characters(rendered(self.messages)) + characters(described(self.tools))
        if found > MOST_CHARACTERS:
            raise BadRequest(
                f"`messages` and `tools` may have {MOST_CHARACTERS} characters of text together; "
                f"these have {found}.",
                param="messages",
            )
        return self

    @property
    def prepare(self) -> Prepare:
        return Prepare(pinned=self.pinned, ttl_s=self.ttl)


@router.post("/v1/cache/prepare", response_model_exclude_unset=True, responses=documented(409, 507))
async def prepare(body: PrepareRequest, request: Request, number: ModelNumber = None) -> Prepared:
    """Compute (`warm`) or only index a prompt's beginning; its key then names that state."""
    models = models_of(request)
    if not models.config.context_cache:
        raise Unsupported("this server reuses nothing: it was started without --context-cache")
    runtime = models.runtime(body.model, number)
    client = AdminClient.of_tenant(request)
    illustrated = await illustrate(request, runtime, body.messages, body.resize)
    conversation = illustrated or Illustrated(rendered(body.messages), [])
    if body.warm:
        work = _warmed(runtime, client, body, conversation, models.config)
    else:
        work = _indexed(runtime, client, body, conversation, models.config)
    return prepared(await while_connected(request, work), runtime.name)


async def _warmed(
    runtime: RuntimeClient,
    client: AdminClient,
    body: PrepareRequest,
    conversation: Illustrated,
    config: Config,
) -> EntryInfo:
    generate = GenerateRequest(
        turn=0,
        messages=conversation.messages,
        pictures=conversation.pictures,
        tools=described(body.tools),
        prepare=body.prepare,
        sampling=SamplingParams(),
        max_tokens=1,
        exact=config.exact,
        kv_bits=body.kv_bits or config.kv_bits,
        kv_group_size=body.kv_group_size,
        kv_quantization_start=(
            config.kv_quantization_start
            if body.kv_quantization_start is None
            else body.kv_quantization_start
        ),
        normalise=config.normalise,
        salt=client.salt,
    )
    with contextlib.closing(Turns(runtime, [generate])) as turns:
        finished = await _finished(turns)
    if finished.cache.new_cache_key is None:
        raise ServerError("the prompt was computed, but its state could not be kept")
    try:
        info = await client.request(runtime, Flush(finished.cache.new_cache_key), EntryInfo)
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


async def _finished(turns: Turns) -> Finished:
    event: Event | None = None
    while not isinstance(event, Finished):
        _, event = await turns.next()
    return event


async def _indexed(
    runtime: RuntimeClient,
    client: AdminClient,
    body: PrepareRequest,
    conversation: Illustrated,
    config: Config,
) -> EntryInfo:
    index = IndexPrompt(
        messages=conversation.messages,
        pictures=conversation.pictures,
        tools=described(body.tools),
        prepare=body.prepare,
        normalise=config.normalise,
    )
    return await client.request(runtime, index, EntryInfo)
