"""What is stored of a response when it ends, and where."""

from __future__ import annotations

import logging
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any

from rekindle.api.responses.conversation_store import ConversationStore
from rekindle.api.responses.requests import KEPT_S, Conversation
from rekindle.api.responses.stored import DocumentClient, as_lines
from rekindle.errors import ServerError
from rekindle.server.runtime_client import RuntimeClient

log = logging.getLogger("rekindle.turn")


@dataclass(frozen=True, slots=True)
class Record:
    """The items that a response answers; with its output they are stored as it asks."""

    runtime: RuntimeClient
    conversation: Conversation
    documents: DocumentClient
    conversations: ConversationStore
    is_stored: bool

    async def save(self, response: dict[str, Any]) -> None:
        """A response that cannot be stored is an answer nevertheless, and says so."""
        if response["conversation"] is not None:
            added = await self._tried(self._append(response))
            response["conversation"] = response["conversation"] if added else None
        if self.is_stored:
            response["store"] = await self._tried(self._save(response))

    async def _append(self, response: dict[str, Any]) -> bool:
        lines = (*self.conversation.own_lines, *as_lines(response["output"]))
        key = response["conversation"]["id"]
        await self.conversations.append(key, lines)
        return True

    async def _save(self, response: dict[str, Any]) -> bool:
        lines = self.conversation.lines
        return await self.documents.save(
            self.runtime, response["id"], lines, response, ttl_s=KEPT_S
        )

    async def _tried(self, saving: Awaitable[bool]) -> bool:
        try:
            return await saving
        except ServerError as error:
            log.warning("a response was not stored: %s", error.code)  # its words may have a key
            return False
