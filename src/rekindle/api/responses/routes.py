"""Serves /v1/responses: creates, shows, cancels and deletes responses."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response
from starlette.websockets import WebSocket

from rekindle.api.base.admin import AdminClient, durability
from rekindle.api.base.documents import (
    DocumentClient,
    Lines,
    PageQuery,
    Stored,
    list_page,
    size_bytes,
)
from rekindle.api.base.fields import MAX_TOKENS
from rekindle.api.base.known_fields import IGNORED_FIELDS_HEADER
from rekindle.api.base.loading import answer_when_loaded, loaded
from rekindle.api.base.models import ModelNumber, models_of
from rekindle.api.base.reply import IGNORED_TOOLS_HEADER, UNENFORCED_HEADER, ignored_headers
from rekindle.api.base.request import RequestBuilder, render_chat
from rekindle.api.responses.background import (
    BACKGROUND,
    BackgroundResponses,
    interrupted,
    replayed,
    stream_of,
)
from rekindle.api.responses.compaction import (
    CompactReply,
    CompactRequest,
    compact_request,
    with_instruction,
)
from rekindle.api.responses.errors import (
    ConversationNotFound,
    PreviousResponseNotFound,
    ResponseIsEnding,
    ResponseNotEnded,
    ResponseNotFound,
)
from rekindle.api.responses.reply import OPEN_RESPONSES, OpenResponses, ResponseReply
from rekindle.api.responses.request import Conversation, count_request, generate_request, names_of
from rekindle.api.responses.response import ResponseObject, referenced
from rekindle.api.responses.schema import InputTokensRequest, PromptFields, ResponsesRequest
from rekindle.api.responses.stored import history_of, lane_of
from rekindle.api.responses.truncation import fitted
from rekindle.api.responses.websocket import Connection
from rekindle.errors import BadRequest, NotFound, Unsupported
from rekindle.http.auth import caller_of
from rekindle.http.body import JsonRoute, run_off_loop_if_large
from rekindle.http.responses import MAY_STREAM, JsonResponse, documented
from rekindle.protocol.admin import Tokenized
from rekindle.worker.client import RuntimeClient

ROOT = "/v1/responses"
ONE = f"{ROOT}/{{response_id}}"

router = APIRouter(route_class=JsonRoute, tags=["responses"])


@router.post(ROOT, responses={**MAY_STREAM, **documented(507)})
async def create_response(
    body: ResponsesRequest, request: Request, number: ModelNumber = None
) -> Response:
    """Answer a conversation of items. State that was computed for an equal prefix, in any dialect,
    is reused. A stored response can be continued by its id, even after a restart."""
    runtime = models_of(request).runtime(body.model, number)
    answer = partial(_answer, body, request, runtime)
    return await answer_when_loaded(request, runtime, answer, stream=bool(body.stream))


async def _answer(body: ResponsesRequest, request: Request, runtime: RuntimeClient) -> Response:
    conversation = await _conversation(request, runtime, body)
    chat = await render_chat(
        request, runtime, conversation.messages, stored_bytes=conversation.size_bytes
    )
    response = ResponseObject(body, runtime.name, models_of(request).config_of(runtime))
    previous = body.previous_response_id
    names = names_of(body, response.id, None if _unstored(request, previous) else previous)
    turn = generate_request(body, conversation, chat, RequestBuilder.of(request, runtime), names)
    headers = _headers(body, conversation)
    reply = ResponseReply(request, runtime, turn, body, conversation, response, headers=headers)
    if body.background:
        return await reply.respond_in_background(stream=bool(body.stream))
    return await reply.respond(stream=bool(body.stream))


@router.post(f"{ROOT}/input_tokens")
async def count_input_tokens(
    body: InputTokensRequest, request: Request, number: ModelNumber = None
) -> Response:
    """Count the tokens of a prompt."""
    models = models_of(request)
    runtime = await loaded(request, models.runtime(body.model, number))
    conversation = await _conversation(request, runtime, body)
    chat = await render_chat(
        request, runtime, conversation.messages, stored_bytes=conversation.size_bytes
    )
    op = count_request(body, conversation, chat, models.config)
    found = await AdminClient.of_tenant(request).request(runtime, op, Tokenized)
    return JsonResponse({"object": "response.input_tokens", "input_tokens": found.count})


@router.post(f"{ROOT}/compact")
async def compact_conversation(
    body: CompactRequest, request: Request, number: ModelNumber = None
) -> Response:
    """Replace a conversation by the user's messages and a summary of everything else. Send the
    `output` as the beginning of the next `input`."""
    runtime = await loaded(request, models_of(request).runtime(body.model, number))
    conversation = await _conversation(request, runtime, body)
    messages = with_instruction(conversation.messages)
    chat = await render_chat(request, runtime, messages, stored_bytes=conversation.size_bytes)
    turn = compact_request(body, conversation, chat, RequestBuilder.of(request, runtime))
    return await CompactReply(request, runtime, turn, conversation).respond(stream=False)


async def _previous(request: Request, body: PromptFields) -> Stored | None:
    """The response or conversation that the request continues."""
    if key := body.previous_response_id:
        if (answer := _being_computed(request, key)) and not answer.has_ended:
            raise ResponseNotEnded(key)
        if unstored := _unstored(request, key):
            return unstored
        return await DocumentClient(request).load(key, PreviousResponseNotFound)
    if key := body.conversation_id:
        return await DocumentClient(request).load(key, ConversationNotFound)
    return None


def _unstored(request: Request, key: str | None) -> Stored | None:
    """A response that was not stored, if it is the last one of this connection."""
    lane = lane_of(request)
    return lane.find(key) if lane and key else None


async def _conversation(
    request: Request, runtime: RuntimeClient, body: PromptFields
) -> Conversation:
    previous = await _previous(request, body)
    history: Lines = history_of(previous) if previous else ()
    sent = body.input if isinstance(body.input, list) else []
    references = await referenced(sent, DocumentClient(request))
    size = len(await request.body()) + size_bytes(history)
    conversation = await run_off_loop_if_large(
        request, size, Conversation.of, body, history, references
    )
    return await fitted(request, runtime, body, conversation, models_of(request).config)


def _headers(body: ResponsesRequest, conversation: Conversation) -> dict[str, str]:
    toolbox = conversation.toolbox
    return ignored_headers(
        {
            IGNORED_FIELDS_HEADER: body.ignored_fields,
            IGNORED_TOOLS_HEADER: toolbox.ignored,
            "x-ignored-items": list(dict.fromkeys(conversation.ignored_items)),
            UNENFORCED_HEADER: toolbox.unenforced,
        }
    )


@router.get(ONE, responses=MAY_STREAM)
async def retrieve_response(
    response_id: str,
    request: Request,
    stream: Annotated[bool, Query()] = False,
    starting_after: Annotated[int | None, Query(ge=0, le=MAX_TOKENS)] = None,
) -> Response:
    """Show a stored response, or what was generated so far of one that is being computed.

    With `stream`, send the events of a background response again: those after the number
    `starting_after`, or all of them.
    """
    if stream:
        return await _streamed_again(request, response_id, starting_after)
    if answer := _being_computed(request, response_id):
        return JsonResponse(answer.so_far())
    return JsonResponse(interrupted((await _stored(request, response_id)).object))


async def _streamed_again(request: Request, key: str, after: int | None) -> Response:
    background: BackgroundResponses = getattr(request.state, BACKGROUND)
    if log := background.log((caller_of(request).salt, key)):
        return stream_of(log.after(after))
    answer = _being_computed(request, key)
    response = answer.so_far() if answer else interrupted((await _stored(request, key)).object)
    if not response["background"]:
        raise Unsupported(
            "only a response that was created with `background: true` can be streamed again: "
            "remove `stream`",
            param="stream",
        )
    return stream_of(replayed(response, after))


@router.delete(ONE, responses=documented(409))
async def delete_response(response_id: str, request: Request) -> Response:
    """Delete a response and the state that only it uses. One that is being computed ends."""
    answer = _being_computed(request, response_id)
    deleted = {"id": response_id, "object": "response", "deleted": True}
    getattr(request.state, BACKGROUND).forget((caller_of(request).salt, response_id))
    if answer is None or not answer.discard() or answer.is_background:
        try:
            removed = await DocumentClient(request).delete(await _stored(request, response_id))
        except NotFound:
            raise ResponseIsEnding if answer else ResponseNotFound(response_id) from None
        deleted |= durability(removed)
    return JsonResponse(deleted)


@router.get(f"{ONE}/input_items")
async def list_input_items(response_id: str, request: Request, page: PageQuery) -> Response:
    """List the items that a response answered, including those of earlier responses."""
    answer = _being_computed(request, response_id)
    found = answer.conversation if answer else await _stored(request, response_id)
    return await list_page(request, found.lines, page)


@router.post(f"{ONE}/cancel")
async def cancel_response(response_id: str, request: Request) -> Response:
    """Cancel a response that is being computed. It keeps what was generated so far."""
    if answer := _being_computed(request, response_id):
        return JsonResponse(await answer.cancel())
    ended: dict[str, Any] = interrupted((await _stored(request, response_id)).object)
    if ended["background"]:  # cancelling one twice has no further effect
        return JsonResponse(ended)
    raise BadRequest(
        f"The response is {ended['status']}: only one that is being computed can be cancelled.",
        param="response_id",
    )


@router.websocket(ROOT)
async def respond_over_websocket(websocket: WebSocket) -> None:
    """Answer `response.create` messages with the events of a stream."""
    await Connection(websocket).serve()


def _being_computed(request: Request, key: str) -> ResponseReply | None:
    found: OpenResponses = getattr(request.state, OPEN_RESPONSES)
    return found.get((caller_of(request).salt, key))


async def _stored(request: Request, key: str) -> Stored:
    return await DocumentClient(request).load(key, ResponseNotFound)
