"""/v1/conversations: make, look at, change and delete conversations and their items."""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.responses import Response

from rekindle.api.responses.conversation_store import ConversationStore
from rekindle.api.responses.items import InputItems, ItemReference, UnservedItem, identified
from rekindle.api.responses.pages import After, Limit, Order, page, page_of
from rekindle.api.responses.schema import Metadata
from rekindle.api.responses.stored import Lines, Stored, as_lines, place_of
from rekindle.errors import BadRequest, NotFound
from rekindle.server.json_route import JsonRoute, beside_loop, beside_loop_if_large
from rekindle.server.responses import JsonResponse, documented

ROOT = "/v1/conversations"
ONE = f"{ROOT}/{{conversation_id}}"
ITEMS = f"{ONE}/items"
ITEM = f"{ITEMS}/{{item_id}}"

router = APIRouter(route_class=JsonRoute, tags=["conversations"])


class _Form(BaseModel):
    model_config = ConfigDict(strict=True)


class CreateConversation(_Form):
    """POST /v1/conversations."""

    items: InputItems | None = None
    metadata: Metadata | None = None


class UpdateConversation(_Form):
    """POST /v1/conversations/{conversation_id}."""

    metadata: Metadata | None


class AddItems(_Form):
    """POST /v1/conversations/{conversation_id}/items."""

    items: InputItems


class ItemNotFound(NotFound):
    code = "item_not_found"

    def __init__(self, item_id: str) -> None:
        super().__init__(
            f"The conversation has no item {item_id[:128]!r}; GET …/items lists those it has.",
            param="item_id",
        )


@router.post(ROOT, responses=documented(507))
async def create_conversation(body: CreateConversation, request: Request) -> Response:
    """A conversation that responses go on from and add to."""
    lines = await beside_loop(request, _lines, body.items or [])
    return JsonResponse(await ConversationStore(request).create(lines, body.metadata or {}))


@router.get(ONE)
async def retrieve_conversation(conversation_id: str, request: Request) -> Response:
    """A conversation, without its items."""
    return JsonResponse((await ConversationStore(request).load(conversation_id)).object)


@router.post(ONE, responses=documented(507))
async def update_conversation(
    conversation_id: str, body: UpdateConversation, request: Request
) -> Response:
    """Replace its metadata."""

    def updated(before: Stored) -> tuple[Lines, dict[str, Any]]:
        return before.lines, {**before.object, "metadata": body.metadata or {}}

    changed = await ConversationStore(request).change(conversation_id, updated)
    return JsonResponse(changed.object)


@router.delete(ONE)
async def delete_conversation(conversation_id: str, request: Request) -> Response:
    """Forget it and its items; responses that were stored stay."""
    await ConversationStore(request).delete(conversation_id)
    return JsonResponse({"id": conversation_id, "object": "conversation.deleted", "deleted": True})


@router.post(ITEMS, responses=documented(507))
async def create_items(conversation_id: str, body: AddItems, request: Request) -> Response:
    """Add items at its end."""
    lines = await beside_loop(request, _lines, body.items)
    kept = await ConversationStore(request).append(conversation_id, lines)
    added = [orjson.loads(line) for line in kept]
    return JsonResponse(page(added, limit=len(added), order="asc", after=None))


@router.get(ITEMS)
async def list_items(
    conversation_id: str,
    request: Request,
    limit: Limit = 20,
    order: Order = "desc",
    after: After = None,
) -> Response:
    """Its items, page by page."""
    stored = await ConversationStore(request).load(conversation_id)
    shown = await beside_loop_if_large(
        request, stored.size_bytes, page_of, stored.lines, limit=limit, order=order, after=after
    )
    return JsonResponse(shown)


@router.get(ITEM)
async def retrieve_item(conversation_id: str, item_id: str, request: Request) -> Response:
    """One of its items."""
    stored = await ConversationStore(request).load(conversation_id)
    place = place_of(item_id, stored.lines)
    if place is None:
        raise ItemNotFound(item_id)
    return JsonResponse(orjson.loads(stored.lines[place]))


@router.delete(ITEM, responses=documented(507))
async def delete_item(conversation_id: str, item_id: str, request: Request) -> Response:
    """Take an item out; the conversation without it."""

    def without(before: Stored) -> tuple[Lines, dict[str, Any]]:
        place = place_of(item_id, before.lines)
        if place is None:
            raise ItemNotFound(item_id)
        return (*before.lines[:place], *before.lines[place + 1 :]), before.object

    changed = await ConversationStore(request).change(conversation_id, without)
    return JsonResponse(changed.object)


def _lines(items: list[Any]) -> Lines:
    for item in items:
        if isinstance(item, ItemReference | UnservedItem):
            raise BadRequest(
                f"Items of the type {item.type[:64]!r} cannot be kept in a conversation: send "
                "messages, calls, their outputs and reasoning.",
                param="items",
            )
    return as_lines(identified(items))
