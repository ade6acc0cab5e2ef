"""Conversation objects: items that outlive their responses, changed by one request at a time."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

from starlette.requests import Request

from rekindle.api.responses.errors import ConversationNotFound
from rekindle.api.responses.items import MOST_ITEMS
from rekindle.api.responses.stored import DocumentClient, Lines, Stored, beside
from rekindle.errors import BadRequest, ServerError
from rekindle.server.auth import caller_of
from rekindle.server.json_route import beside_loop_if_large
from rekindle.server.models import models_of

PREFIX = "conv_"
RANDOM_BYTES = 16
CONVERSATION_LOCKS = "conversation_locks"  # in the state of the application

Change = Callable[[Stored], tuple[Lines, dict[str, Any]]]


class NoRoomForConversation(ServerError):
    status, kind, code = 507, "insufficient_storage_error", "conversation_too_large"

    def __init__(self) -> None:
        super().__init__(
            "There is no room for this conversation: delete some of its items, or begin another."
        )


class ConversationLocks:
    """A lock for each conversation that is being changed."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[tuple[bytes, str], asyncio.Lock] = WeakValueDictionary()

    def of(self, tenant: bytes, key: str) -> asyncio.Lock:
        return self._locks.setdefault((tenant, key), asyncio.Lock())


class ConversationStore:
    """The conversations of one caller."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._documents = DocumentClient(request)
        self._first = models_of(request).runtimes[0]
        self._tenant = caller_of(request).salt
        self._locks: ConversationLocks = getattr(request.state, CONVERSATION_LOCKS)

    async def load(self, key: str) -> Stored:
        missing = ConversationNotFound(key)
        if not key.startswith(PREFIX):  # other entries are not conversations
            raise missing
        return await self._documents.load(key, missing)

    async def create(self, lines: Lines, metadata: dict[str, str]) -> dict[str, Any]:
        """A new one; whatever model answers in it, the first one's runtime keeps it."""
        created: dict[str, Any] = {
            "id": f"{PREFIX}{secrets.token_hex(RANDOM_BYTES)}",
            "object": "conversation",
            "created_at": int(time.time()),
            "metadata": metadata,
        }
        if not await self._documents.save(self._first, created["id"], lines, created):
            raise NoRoomForConversation
        return created

    async def change(self, key: str, change: Change) -> Stored:
        """The conversation after a change, which sees what the one before it left."""
        async with self._locks.of(self._tenant, key):
            before = await self.load(key)
            lines, changed = await beside_loop_if_large(
                self._request, before.size_bytes, change, before
            )
            if len(lines) > MOST_ITEMS:
                raise BadRequest(
                    f"A conversation has at most {MOST_ITEMS} items: begin another.", param="items"
                )
            kept = await self._documents.save(before.runtime, key, lines, changed)
        if not kept:
            raise NoRoomForConversation
        return Stored(key, before.runtime, lines, changed)

    async def append(self, key: str, lines: Lines) -> Lines:
        """As they are stored: ids that are taken are replaced."""

        def appended(before: Stored) -> tuple[Lines, dict[str, Any]]:
            return (*before.lines, *beside(before.lines, lines)), before.object

        changed = await self.change(key, appended)
        return changed.lines[len(changed.lines) - len(lines) :]

    async def delete(self, key: str) -> None:
        async with self._locks.of(self._tenant, key):
            await self._documents.delete(await self.load(key))
