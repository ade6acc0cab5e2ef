"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from rekindle.api.anthropic.answer import Answer
from rekindle.api.anthropic.errors import ROOT, AnthropicErrorBody
from rekindle.api.anthropic.lifetime import lifetime_of
from rekindle.api.anthropic.message_id import new_message_id
from rekindle.api.anthropic.requests import Conversation, generate_request, token_question
from rekindle.api.anthropic.schema import CountTokensRequest, MessagesRequest
from rekindle.api.illustration import illustrate
from rekindle.api.names import with_affinity
from rekindle.api.notes import IGNORED_TOOLS, notes
from rekindle.protocol.tokenisation import Tokenized
from rekindle.server.admin_client import AdminClient
from rekindle.server.auth import caller_of
from rekindle.server.json_route import JsonRoute, beside_loop
from rekindle.server.models import ModelNumber, ServedModels, models_of
from rekindle.server.responses import MAY_STREAM, JsonResponse, documented
from rekindle.server.runtime_client import RuntimeClient

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
    conversation = await beside_loop(request, Conversation.of, body)
    illustrated = await illustrate(request, runtime, conversation.messages, None)
    message_id = new_message_id(runtime.name)
    asked = await beside_loop(
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
    conversation = await beside_loop(request, Conversation.of, body)
    illustrated = await illustrate(request, runtime, conversation.messages, None)
    asked = await beside_loop(
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
