"""Stored responses: GET and DELETE /v1/responses/{id}, its input items, and its cancellation."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from rekindle.api.responses.errors import ResponseNotFound
from rekindle.api.responses.open_responses import OPEN_RESPONSES, OpenResponses
from rekindle.api.responses.pages import After, Limit, Order, page
from rekindle.api.responses.response import PREFIX
from rekindle.api.responses.routes import ROOT
from rekindle.api.responses.stored import DocumentClient, Stored
from rekindle.errors import BadRequest, Unsupported
from rekindle.server.auth import caller_of
from rekindle.server.json_route import JsonRoute
from rekindle.server.responses import JsonResponse

ONE = f"{ROOT}/{{response_id}}"

router = APIRouter(route_class=JsonRoute, tags=["responses"])


@router.get(ONE)
async def retrieve_response(
    response_id: str, request: Request, stream: Annotated[bool, Query()] = False
) -> Response:
    """A stored response as it was answered."""
    if stream:
        raise Unsupported(
            "only responses that are computed in the background are streamed again, and there are "
            "none here: remove `stream`",
            param="stream",
        )
    return JsonResponse((await _stored(request, response_id)).object)


@router.delete(ONE)
async def delete_response(response_id: str, request: Request) -> Response:
    """Forget a response, and the state that is no other's."""
    stored = await _stored(request, response_id)
    await DocumentClient(request).delete(stored)
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
    items = (await _stored(request, response_id)).items
    return JsonResponse(page(items, limit=limit, order=order, after=after))


@router.post(f"{ONE}/cancel")
async def cancel_response(response_id: str, request: Request) -> Response:
    """End a response that is being computed, as far as it has come."""
    being_computed: OpenResponses = getattr(request.state, OPEN_RESPONSES)
    answer = being_computed.find(caller_of(request).salt, response_id)
    if answer is not None:
        return JsonResponse(await answer.cancel())
    ended: dict[str, Any] = (await _stored(request, response_id)).object
    raise BadRequest(
        f"The response is {ended['status']}: only one that is being computed can be cancelled.",
        param="response_id",
    )


async def _stored(request: Request, key: str) -> Stored:
    missing = ResponseNotFound(key)
    if not key.startswith(PREFIX):  # other entries are not responses
        raise missing
    return await DocumentClient(request).load(key, missing)
