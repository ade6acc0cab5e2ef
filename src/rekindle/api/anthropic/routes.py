"""Serves /v1/messages, /v1/messages/count_tokens, and /v1/models in Anthropic's form."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial
from typing import Any

from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Scope

from rekindle.api.anthropic.caching import new_message_id
from rekindle.api.anthropic.errors import ROOT, VERSION, AnthropicErrorBody
from rekindle.api.anthropic.reply import MessageReply
from rekindle.api.anthropic.request import Conversation, generate_request, prompt_fields
from rekindle.api.anthropic.schema import CountTokensRequest, MessagesRequest
from rekindle.api.anthropic.threads import thread_of
from rekindle.api.base.admin import AdminClient
from rekindle.api.base.known_fields import IGNORED_FIELDS_HEADER
from rekindle.api.base.loading import Waiting, answer_when_loaded, loaded, sse_progress
from rekindle.api.base.models import ModelNumber, ServedModels, models_of
from rekindle.api.base.reply import IGNORED_TOOLS_HEADER, ignored_headers
from rekindle.api.base.request import RequestBuilder, render_chat
from rekindle.http.body import JsonRoute, run_off_loop, run_off_loop_if_large
from rekindle.http.responses import MAY_STREAM, JsonResponse, documented, sse_event
from rekindle.protocol.admin import Tokenize, Tokenized
from rekindle.worker.client import RuntimeClient

ERRORS = documented(400, model=AnthropicErrorBody)

router = APIRouter(route_class=JsonRoute, tags=["messages"])


def _ping(name: str, fraction: float) -> bytes:
    """Clients of this API expect pings. The comment tells people what the stream waits for."""
    return sse_progress(name, fraction) + sse_event("ping", {"type": "ping"})


PINGS = Waiting(_ping)


@router.post(ROOT, responses={**MAY_STREAM, **ERRORS})
async def create_message(
    body: MessagesRequest, request: Request, number: ModelNumber = None
) -> Response:
    """Answer a conversation. State that was computed for an equal prefix, in any dialect, is
    reused."""
    runtime = _runtime(models_of(request), body.model, number)
    answer = partial(_answer, body, request, runtime)
    return await answer_when_loaded(
        request, runtime, answer, stream=bool(body.stream), waiting=PINGS
    )


async def _answer(body: MessagesRequest, request: Request, runtime: RuntimeClient) -> Response:
    thread = await thread_of(request, body)
    stored_bytes = thread.size_bytes if thread else 0
    body = thread.body if thread else body
    size_bytes = len(await request.body()) + stored_bytes
    conversation = await run_off_loop_if_large(request, size_bytes, Conversation.of, body)
    chat = await render_chat(request, runtime, conversation.messages, stored_bytes=stored_bytes)
    message_id = new_message_id(runtime.name)
    builder = RequestBuilder.of(request, runtime)
    turn = generate_request(body, conversation, chat, builder, message_id)
    headers = ignored_headers(
        {
            IGNORED_FIELDS_HEADER: body.ignored_fields,
            IGNORED_TOOLS_HEADER: conversation.toolbox.ignored,
        }
    )
    reply = MessageReply(request, runtime, turn, body, message_id, headers=headers, thread=thread)
    return await reply.respond(stream=bool(body.stream))


@router.post(f"{ROOT}/count_tokens", responses=ERRORS)
async def count_tokens(
    body: CountTokensRequest, request: Request, number: ModelNumber = None
) -> Response:
    """Count the tokens of a prompt."""
    models = models_of(request)
    runtime = await loaded(request, _runtime(models, body.model, number))
    conversation = await run_off_loop(request, Conversation.of, body)
    chat = await render_chat(request, runtime, conversation.messages)
    fields = prompt_fields(body, conversation, chat, models.config)
    op = Tokenize(**fields, with_tokens=False)
    found = await AdminClient.of_tenant(request).request(runtime, op, Tokenized)
    return JsonResponse({"input_tokens": found.count})


def _runtime(models: ServedModels, model: str | None, number: str | None) -> RuntimeClient:
    """Let the default model answer for names like claude-…, which clients have built in for small
    tasks. The answer names the model that wrote it."""
    is_built_in = model is not None and model.startswith("claude-")
    is_unknown = is_built_in and model is not None and not models.knows(model)
    return models.runtime(None if is_unknown else model, number)


class VersionedRoute(APIRoute):
    """Matches only requests that name a version of Anthropic's API. OpenAI has the same paths."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        if scope["type"] == "http" and VERSION not in Headers(scope=scope):
            return Match.NONE, {}
        return super().matches(scope)


models_router = APIRouter(route_class=VersionedRoute, include_in_schema=False)


@models_router.get("/v1/models")
async def list_models(request: Request) -> Response:
    """List the models that answer /v1/messages."""
    models = models_of(request)
    data = [_model(runtime, models.started_at) for runtime in models.runtimes]
    ids = [each["id"] for each in data]
    first, last = (ids[0], ids[-1]) if ids else (None, None)
    page = {"has_more": False, "first_id": first, "last_id": last}
    return JsonResponse({"data": data, **page})


@models_router.get("/v1/models/{model:path}")
async def retrieve_model(model: str, request: Request) -> Response:
    """Show one model."""
    if not model:
        return await list_models(request)
    models = models_of(request)
    return JsonResponse(_model(models.runtime(model), models.started_at))


@router.get("/api/hello", include_in_schema=False)
async def hello() -> Response:
    """Answer the first request of Claude Code, which checks that the server is up."""
    return JsonResponse({"message": "hello"})


def _model(runtime: RuntimeClient, created_at: int) -> dict[str, Any]:
    context_tokens = runtime.described.context_tokens if runtime.described else None
    return {
        "type": "model",
        "id": runtime.name,
        "display_name": runtime.name,
        "created_at": datetime.fromtimestamp(created_at, UTC).isoformat(),
        "lifecycle": "active",
        "max_input_tokens": context_tokens,
        "max_tokens": context_tokens,
    }
