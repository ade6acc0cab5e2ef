"""POST /v1/responses and /v1/responses/input_tokens."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from rekindle.api.illustration import illustrate
from rekindle.api.names import with_affinity
from rekindle.api.notes import IGNORED_TOOLS, notes
from rekindle.api.responses.answer import Answer
from rekindle.api.responses.conversation_store import ConversationStore
from rekindle.api.responses.errors import PreviousResponseNotFound
from rekindle.api.responses.output import ReplyItems
from rekindle.api.responses.record import Record
from rekindle.api.responses.references import referenced
from rekindle.api.responses.requests import (
    Conversation,
    generate_request,
    names_of,
    token_question,
)
from rekindle.api.responses.response import PREFIX, ResponseObject, new_number
from rekindle.api.responses.schema import InputTokensRequest, PromptFields, ResponsesRequest
from rekindle.api.responses.stored import DocumentClient, Lines, Stored
from rekindle.api.responses.truncation import fitted
from rekindle.protocol.tokenisation import Tokenized
from rekindle.server.admin_client import AdminClient
from rekindle.server.auth import caller_of
from rekindle.server.json_route import JsonRoute, beside_loop_if_large
from rekindle.server.models import ModelNumber, models_of
from rekindle.server.responses import MAY_STREAM, JsonResponse

ROOT = "/v1/responses"
IGNORED_ITEMS = "x-ignored-items"  # in the answer: types of items of tools that there are not here
UNENFORCED = "x-unenforced-grammars"  # custom tools whose grammar the model is only told

router = APIRouter(route_class=JsonRoute, tags=["responses"])


@router.post(ROOT, responses=MAY_STREAM)
async def create_response(
    body: ResponsesRequest, request: Request, number: ModelNumber = None
) -> Response:
    """Answer a conversation in items. What was computed for an equal prefix before, in any form, is
    reused; a stored response can be gone on from by its id, after a restart, too."""
    models = models_of(request)
    runtime = models.runtime(body.model, number)
    previous = await _previous(request, body)
    conversation = await _conversation(request, body, previous)
    conversation = await fitted(request, runtime, body, conversation, models.config)
    illustrated = await illustrate(request, runtime, conversation.messages, None)
    response = ResponseObject(body, new_number(), runtime.name, models.config)
    asked = await beside_loop_if_large(
        request,
        len(await request.body()) + conversation.size_bytes,
        generate_request,
        body,
        conversation,
        illustrated,
        models.config,
        caller_of(request).salt,
        names_of(body, response.id),
    )
    stores = DocumentClient(request), ConversationStore(request)
    record = Record(runtime, conversation, *stores, is_stored=body.is_stored)
    items = ReplyItems(response.number, conversation.toolbox, seals_reasoning=body.seals_reasoning)
    answer = Answer(
        runtime,
        with_affinity(request, asked),
        body,
        response,
        items,
        record,
        others=models.others(runtime),
        headers=_notes(conversation),
    )
    return await answer.respond(request)


@router.post(f"{ROOT}/input_tokens")
async def count_input_tokens(
    body: InputTokensRequest, request: Request, number: ModelNumber = None
) -> Response:
    """How many tokens the prompt of such a response has."""
    models = models_of(request)
    runtime = models.runtime(body.model, number)
    previous = await _previous(request, body)
    conversation = await _conversation(request, body, previous)
    conversation = await fitted(request, runtime, body, conversation, models.config)
    illustrated = await illustrate(request, runtime, conversation.messages, None)
    asked = await beside_loop_if_large(
        request,
        len(await request.body()) + conversation.size_bytes,
        token_question,
        body,
        conversation,
        illustrated,
        models.config,
    )
    found = await AdminClient.of_tenant(request).request(runtime, asked, Tokenized)
    return JsonResponse({"object": "response.input_tokens", "input_tokens": found.count})


async def _previous(request: Request, body: PromptFields) -> Stored | None:
    """What the request goes on from: a response, or a conversation."""
    if key := body.previous_response_id:
        missing = PreviousResponseNotFound(key)
        if not key.startswith(PREFIX):  # other entries are not responses
            raise missing
        return await DocumentClient(request).load(key, missing)
    key = body.conversation_id
    return await ConversationStore(request).load(key) if key else None


async def _conversation(
    request: Request, body: PromptFields, previous: Stored | None
) -> Conversation:
    history: Lines = previous.history if previous else ()
    sent = body.input if isinstance(body.input, list) else []
    references = await referenced(sent, DocumentClient(request))
    size_bytes = len(await request.body()) + sum(map(len, history))
    return await beside_loop_if_large(
        request, size_bytes, Conversation.of, body, history, references
    )


def _notes(conversation: Conversation) -> dict[str, str]:
    toolbox = conversation.toolbox
    return notes(
        {
            IGNORED_TOOLS: toolbox.ignored,
            IGNORED_ITEMS: list(dict.fromkeys(conversation.ignored_items)),
            UNENFORCED: toolbox.unenforced,
        }
    )
