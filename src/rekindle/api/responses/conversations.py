"""Serves /v1/conversations: conversations that outlive their responses, and their items."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakValueDictionary

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from rekindle.api.base.admin import durability
from rekindle.api.base.documents import (
    DocumentClient,
    Lines,
    PageQuery,
    Stored,
    as_lines,
    list_page,
    page_of,
    size_bytes,
)
from rekindle.api.base.fields import MAX_ITEMS, Metadata, StrictModel
from rekindle.api.base.loading import loaded
from rekindle.api.base.models import models_of
from rekindle.api.responses.errors import ConversationNotFound
from rekindle.api.responses.items import (
    ID_BYTES,
    InputItems,
    ItemReference,
    UnservedItem,
    identified,
)
from rekindle.api.responses.stored import place_of, with_new_ids
from rekindle.errors import BadRequest, ServerError
from rekindle.http.auth import caller_of
from rekindle.http.body import JsonRoute, run_off_loop, run_off_loop_if_large
from rekindle.http.responses import JsonResponse, documented
from rekindle.protocol.admin import DocumentStored, Removed

CONVERSATION_LOCKS = "conversation_locks"  # key in the application's state

# One lock for each conversation of a tenant, so that requests change it one after the other.
ConversationLocks = WeakValueDictionary[tuple[bytes, str], asyncio.Lock]
Change = Callable[[Stored], tuple[Lines, dict[str, Any]]]


class NoRoomForConversation(ServerError):
    status, kind, code = 507, "insufficient_storage_error", "conversation_too_large"

    def __init__(self) -> None:
        super().__init__(
            "There is no room for this conversation: delete some of its items, or begin another."
        )


@dataclass(frozen=True, slots=True)
class Changed:
    """A changed conversation, or the part of it that a request added."""

    lines: Lines
    object: dict[str, Any]
    durability: dict[str, Any]  # `durable: false` if the change is in memory only


class ConversationStore:
    def __init__(self, request: Request, *, refuses: bool = True) -> None:
        """`refuses` has the same meaning as in `DocumentClient`."""
        self._request = request
        self._documents = DocumentClient(request, refuses=refuses)
        models = models_of(request)
        self._first = (models.loaded_runtimes or models.runtimes)[0]
        self._tenant = caller_of(request).salt
        self._locks: ConversationLocks = getattr(request.state, CONVERSATION_LOCKS)

    def _lock(self, key: str) -> asyncio.Lock:
        return self._locks.setdefault((self._tenant, key), asyncio.Lock())

    async def load(self, key: str) -> Stored:
        return await self._documents.load(key, ConversationNotFound)

    async def create(self, lines: Lines, metadata: dict[str, str]) -> dict[str, Any]:
        """Create a conversation. The first runtime stores it, whichever model answers in it."""
        created: dict[str, Any] = {
            "id": f"{ConversationNotFound.prefix}{secrets.token_hex(ID_BYTES)}",
            "object": "conversation",
            "created_at": int(time.time()),
            "metadata": metadata,
        }
        first = await loaded(self._request, self._first)
        saved = await self._documents.save(first, created["id"], lines, created)
        return created | _confirmed(saved)

    async def change(self, key: str, change: Change) -> Changed:
        """Change a conversation and return it. Changes run one after the other."""
        async with (
            self._lock(key),
            self._documents.loaded(key, ConversationNotFound) as before,
        ):
            size = size_bytes(before.lines)
            lines, changed = await run_off_loop_if_large(self._request, size, change, before)
            if len(lines) > MAX_ITEMS:
                raise BadRequest(
                    f"A conversation has at most {MAX_ITEMS} items: begin another.", param="items"
                )
            saved = await self._documents.save(before.runtime, key, lines, changed)
        return Changed(lines, changed, _confirmed(saved))

    async def append(self, key: str, lines: Lines) -> Changed:
        """Append items and return them as stored, with new ids if theirs were taken."""

        def appended(before: Stored) -> tuple[Lines, dict[str, Any]]:
            return (*before.lines, *with_new_ids(before.lines, lines)), before.object

        changed = await self.change(key, appended)
        return replace(changed, lines=changed.lines[len(changed.lines) - len(lines) :])

    async def delete(self, key: str) -> Removed:
        async with self._lock(key):
            return await self._documents.delete(await self.load(key))


def _confirmed(saved: DocumentStored) -> dict[str, Any]:
    """`durable: false` if the conversation is in memory only. Raises NoRoomForConversation."""
    if not saved.kept:
        raise NoRoomForConversation
    return durability(saved)


ROOT = "/v1/conversations"
ONE = f"{ROOT}/{{conversation_id}}"
ITEMS = f"{ONE}/items"
ITEM = f"{ITEMS}/{{item_id}}"

router = APIRouter(route_class=JsonRoute, tags=["conversations"])


class CreateConversation(StrictModel):
    """POST /v1/conversations."""

    items: InputItems | None = None
    metadata: Metadata | None = None


class UpdateConversation(StrictModel):
    """POST /v1/conversations/{conversation_id}."""

    metadata: Metadata | None


class AddItems(StrictModel):
    """POST /v1/conversations/{conversation_id}/items."""

    items: InputItems


@router.post(ROOT, responses=documented(503, 507))
async def create_conversation(body: CreateConversation, request: Request) -> Response:
    """Create a conversation that responses can continue and add to."""
    lines = await run_off_loop(request, _lines, body.items or [])
    return JsonResponse(await ConversationStore(request).create(lines, body.metadata or {}))


@router.get(ONE)
async def retrieve_conversation(conversation_id: str, request: Request) -> Response:
    """Show a conversation without its items."""
    return JsonResponse((await ConversationStore(request).load(conversation_id)).object)


@router.post(ONE, responses=documented(503, 507))
async def update_conversation(
    conversation_id: str, body: UpdateConversation, request: Request
) -> Response:
    """Replace the metadata."""

    def updated(before: Stored) -> tuple[Lines, dict[str, Any]]:
        return before.lines, {**before.object, "metadata": body.metadata or {}}

    changed = await ConversationStore(request).change(conversation_id, updated)
    return JsonResponse(changed.object | changed.durability)


@router.delete(ONE)
async def delete_conversation(conversation_id: str, request: Request) -> Response:
    """Delete a conversation and its items. Stored responses stay."""
    removed = await ConversationStore(request).delete(conversation_id)
    deleted = {"id": conversation_id, "object": "conversation.deleted", "deleted": True}
    return JsonResponse(deleted | durability(removed))


@router.post(ITEMS, responses=documented(503, 507))
async def create_items(conversation_id: str, body: AddItems, request: Request) -> Response:
    """Append items."""
    lines = await run_off_loop(request, _lines, body.items)
    added = await ConversationStore(request).append(conversation_id, lines)
    page = page_of(added.lines, limit=len(lines), order="asc", after=None)
    return JsonResponse(page | added.durability)


@router.get(ITEMS)
async def list_items(conversation_id: str, request: Request, page: PageQuery) -> Response:
    """List the items, page by page."""
    stored = await ConversationStore(request).load(conversation_id)
    return await list_page(request, stored.lines, page)


@router.get(ITEM)
async def retrieve_item(conversation_id: str, item_id: str, request: Request) -> Response:
    """Show one item."""
    stored = await ConversationStore(request).load(conversation_id)
    return JsonResponse(orjson.loads(stored.lines[place_of(item_id, stored.lines)]))


@router.delete(ITEM, responses=documented(503, 507))
async def delete_item(conversation_id: str, item_id: str, request: Request) -> Response:
    """Delete an item and return the conversation."""

    def without(before: Stored) -> tuple[Lines, dict[str, Any]]:
        place = place_of(item_id, before.lines)
        return (*before.lines[:place], *before.lines[place + 1 :]), before.object

    changed = await ConversationStore(request).change(conversation_id, without)
    return JsonResponse(changed.object | changed.durability)


def _lines(items: list[Any]) -> Lines:
    for item in items:
        if isinstance(item, ItemReference | UnservedItem):
            raise BadRequest(
                f"Items of the type {item.type[:64]!r} cannot be kept in a conversation: send "
                "messages, calls, their outputs and reasoning.",
                param="items",
            )
    return as_lines(identified(items))
