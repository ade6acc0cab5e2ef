"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Scope

from rekindle.api.anthropic.caching import lifetime_of, new_message_id
from rekindle.api.anthropic.errors import ROOT, VERSION, AnthropicErrorBody
from rekindle.api.anthropic.reply import Answer
from rekindle.api.anthropic.request import Conversation, generate_request, token_question
from rekindle.api.anthropic.schema import CountTokensRequest, MessagesRequest
from rekindle.api.base.admin import AdminClient
from rekindle.api.base.images import illustrate
from rekindle.api.base.models import ModelNumber, ServedModels, models_of
from rekindle.api.base.names import with_affinity
from rekindle.api.base.report import IGNORED_TOOLS, notes
from rekindle.http.auth import caller_of
from rekindle.http.body import JsonRoute, run_off_loop
from rekindle.http.responses import MAY_STREAM, JsonResponse, documented
from rekindle.protocol.admin import Tokenized
from rekindle.worker.client import RuntimeClient

OTHER_MODELS = "claude-"  # as the names begin that clients have built in
ERRORS = documented(400, model=AnthropicErrorBody)

router = APIRouter(route_class=JsonRoute, tags=["messages"])


@router.post(ROOT, responses={**MAY_STREAM, **ERRORS})
async def create_message(
    body: MessagesRequest, request: Request, number: ModelNumber = None
) -> Response:
    """Answer a conversation in Anthropic's form; what was computed for an equal prefix before, in
    any form, is reused."""
    models = models_of(request)
    runtime = _runtime(models, body.model, number)
    conversation = await run_off_loop(request, Conversation.of, body)
    illustrated = await illustrate(request, runtime, conversation.messages, None)
    message_id = new_message_id(runtime.name)
    asked = await run_off_loop(
        request,
        generate_request,
        body,
        conversation,
        illustrated,
        models.config,
        caller_of(request).salt,
        message_id,
    )
    answer = Answer(
        runtime,
        with_affinity(request, asked),
        body,
        message_id,
        lifetime=lifetime_of(body),
        headers=notes({IGNORED_TOOLS: conversation.toolbox.ignored}),
    )
    return await answer.respond(request)


@router.post(f"{ROOT}/count_tokens", responses=ERRORS)
async def count_tokens(
    body: CountTokensRequest, request: Request, number: ModelNumber = None
) -> Response:
    """How many tokens the prompt of such a message has."""
    models = models_of(request)
    runtime = _runtime(models, body.model, number)
    conversation = await run_off_loop(request, Conversation.of, body)
    illustrated = await illustrate(request, runtime, conversation.messages, None)
    asked = await run_off_loop(
        request, token_question, body, conversation, illustrated, models.config
    )
    found = await AdminClient.of_tenant(request).request(runtime, asked, Tokenized)
    return JsonResponse({"input_tokens": found.count})


def _runtime(models: ServedModels, model: str | None, number: str | None) -> RuntimeClient:
    """Clients ask for small helpers by names that they have built in: the first model answers for
    those, and its answer says which it is."""
    is_built_in = model is not None and model.startswith(OTHER_MODELS)
    served = {runtime.name for runtime in models.all}
    return models.runtime(None if is_built_in and model not in served else model, number)


# ----------------------------------------------------------------------
# GET /v1/models in Anthropic's shape, and GET /api/hello.


class VersionedRoute(APIRoute):
    """A route for requests that say which version of Anthropic's API they are written for; all
    others go on to the next route of this path."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        if scope["type"] == "http" and VERSION not in Headers(scope=scope):
            return Match.NONE, {}
        return super().matches(scope)


models_router = APIRouter(include_in_schema=False)
versioned = APIRouter(route_class=VersionedRoute, include_in_schema=False)


@versioned.get("/v1/models")
async def list_models(request: Request) -> Response:
    """The models that answer /v1/messages."""
    models = models_of(request)
    data = [_model(runtime, models.started_at) for runtime in models.runtimes]
    ids = [each["id"] for each in data]
    page = {"has_more": False, "first_id": ids[0], "last_id": ids[-1]}
    return JsonResponse({"data": data, **page})


@versioned.get("/v1/models/{model:path}")
async def retrieve_model(model: str, request: Request) -> Response:
    """One of them."""
    if not model:
        return await list_models(request)
    models = models_of(request)
    return JsonResponse(_model(models.runtime(model), models.started_at))


@models_router.get("/api/hello")
async def hello() -> Response:
    """Claude Code asks this first, whether anybody is there."""
    return JsonResponse({"message": "hello"})


models_router.include_router(versioned)


def _model(runtime: RuntimeClient, created_at: int) -> dict[str, Any]:
    context_tokens = runtime.ready.context_tokens if runtime.ready else None
    return {
        "type": "model",
        "id": runtime.name,
        "display_name": runtime.name,
        "created_at": datetime.fromtimestamp(created_at, UTC).isoformat(),
        "lifecycle": "active",
        "max_input_tokens": context_tokens,
        "max_tokens": context_tokens,
    }
