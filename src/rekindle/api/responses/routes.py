"""POST /v1/responses and /v1/responses/input_tokens."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from rekindle.api.base.admin import AdminClient
from rekindle.api.base.images import illustrate
from rekindle.api.base.models import ModelNumber, models_of
from rekindle.api.base.names import with_affinity
from rekindle.api.base.report import IGNORED_TOOLS, notes
from rekindle.api.responses.conversations import ConversationStore
from rekindle.api.responses.errors import (
    PreviousResponseNotFound,
    ResponseIsEnding,
    ResponseNotFound,
)
from rekindle.api.responses.output import ReplyItems
from rekindle.api.responses.reply import Answer, Record
from rekindle.api.responses.request import Conversation, generate_request, names_of, token_question
from rekindle.api.responses.response import PREFIX, ResponseObject, new_number, referenced
from rekindle.api.responses.schema import InputTokensRequest, PromptFields, ResponsesRequest
from rekindle.api.responses.stored import (
    OPEN_RESPONSES,
    After,
    DocumentClient,
    Limit,
    Lines,
    OpenResponse,
    OpenResponses,
    Order,
    Stored,
    page_of,
    size_bytes,
)
from rekindle.api.responses.truncation import fitted
from rekindle.errors import BadRequest, NotFound, Unsupported
from rekindle.http.auth import caller_of
from rekindle.http.body import JsonRoute, run_off_loop_if_large
from rekindle.http.responses import MAY_STREAM, JsonResponse, documented
from rekindle.protocol.admin import Tokenized

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
    asked = await run_off_loop_if_large(
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
    asked = await run_off_loop_if_large(
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
    return await run_off_loop_if_large(
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


# ----------------------------------------------------------------------
# Stored responses: GET and DELETE /v1/responses/{id}, its input items, and its cancellation.

ONE = f"{ROOT}/{{response_id}}"


@router.get(ONE)
async def retrieve_response(
    response_id: str, request: Request, stream: Annotated[bool, Query()] = False
) -> Response:
    """A stored response as it was answered, or one that is being computed as far as it has come."""
    if stream:
        raise Unsupported(
            "only responses that are computed in the background are streamed again, and there are "
            "none here: remove `stream`",
            param="stream",
        )
    if answer := _being_computed(request, response_id):
        return JsonResponse(answer.so_far())
    return JsonResponse((await _stored(request, response_id)).object)


@router.delete(ONE, responses=documented(409))
async def delete_response(response_id: str, request: Request) -> Response:
    """Forget a response, and the state that is no other's; one that is being computed ends."""
    answer = _being_computed(request, response_id)
    if answer is None or not answer.discard():
        try:
            await DocumentClient(request).delete(await _stored(request, response_id))
        except NotFound:
            raise ResponseIsEnding if answer else ResponseNotFound(response_id) from None
    return JsonResponse({"id": response_id, "object": "response", "deleted": True})


@router.get(f"{ONE}/input_items")
async def list_input_items(
    response_id: str,
    request: Request,
    limit: Limit = 20,
    order: Order = "desc",
    after: After = None,
) -> Response:
    """The items that a response answered, those of the responses before it included."""
    answer = _being_computed(request, response_id)
    lines = answer.input_lines if answer else (await _stored(request, response_id)).lines
    shown = await run_off_loop_if_large(
        request, size_bytes(lines), page_of, lines, limit=limit, order=order, after=after
    )
    return JsonResponse(shown)


@router.post(f"{ONE}/cancel")
async def cancel_response(response_id: str, request: Request) -> Response:
    """End a response that is being computed, as far as it has come."""
    if answer := _being_computed(request, response_id):
        return JsonResponse(await answer.cancel())
    ended: dict[str, Any] = (await _stored(request, response_id)).object
    raise BadRequest(
        f"The response is {ended['status']}: only one that is being computed can be cancelled.",
        param="response_id",
    )


def _being_computed(request: Request, key: str) -> OpenResponse | None:
    found: OpenResponses = getattr(request.state, OPEN_RESPONSES)
    return found.find(caller_of(request).salt, key)


async def _stored(request: Request, key: str) -> Stored:
    missing = ResponseNotFound(key)
    if not key.startswith(PREFIX):  # other entries are not responses
        raise missing
    return await DocumentClient(request).load(key, missing)
