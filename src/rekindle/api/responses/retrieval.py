"""Stored responses: GET and DELETE /v1/responses/{id}, its input items, and its cancellation."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from rekindle.api.responses.errors import ResponseIsEnding, ResponseNotFound
from rekindle.api.responses.open_responses import OPEN_RESPONSES, OpenResponse, OpenResponses
from rekindle.api.responses.pages import After, Limit, Order, page_of
from rekindle.api.responses.response import PREFIX
from rekindle.api.responses.routes import ROOT
from rekindle.api.responses.stored import DocumentClient, Stored, size_bytes
from rekindle.errors import BadRequest, NotFound, Unsupported
from rekindle.server.auth import caller_of
from rekindle.server.json_route import JsonRoute, beside_loop_if_large
from rekindle.server.responses import JsonResponse, documented

ONE = f"{ROOT}/{{response_id}}"

router = APIRouter(route_class=JsonRoute, tags=["responses"])


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
    shown = await beside_loop_if_large(
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
