"""Formats a reply as a response, whole or streamed, and stores it."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from rekindle.api.base.reply import Reply, x_cache
from rekindle.api.responses.conversations import ConversationStore
from rekindle.api.responses.output import ReplyItems
from rekindle.api.responses.request import STORED_S, Conversation
from rekindle.api.responses.response import ResponseObject, usage
from rekindle.api.responses.schema import ResponsesRequest
from rekindle.api.responses.stored import DocumentClient, Lines, as_lines
from rekindle.errors import BadRequest, ContextTooLong, ServerError
from rekindle.http.responses import sse_comment, sse_event
from rekindle.protocol.events import CacheReport, Delta, Event, Finished, Part, Reason
from rekindle.protocol.requests import GenerateRequest
from rekindle.worker.client import RuntimeClient

CHANGES = {
    Reason.SYSTEM_CHANGED: "input_changed",
    Reason.TOOLS_CHANGED: "tools_changed",
    Reason.TURN_CHANGED: "input_changed",
    Reason.PREFIX_CHANGED: "input_changed",
    Reason.REQUEST_SHORTER: "input_changed",
    Reason.MODEL_MISMATCH: "model_changed",
}


def diagnostics(prompt_tokens: int, cache: CacheReport) -> dict[str, Any]:
    """`prompt_cache_diagnostics`: what has changed since the response that the client names."""
    missed = {
        "cache_missed_tokens": prompt_tokens - cache.reused_tokens,
        "comparison_reusable_tokens": cache.reused_tokens,
    }
    if cache.cache_key is None and cache.reason is not Reason.MODEL_MISMATCH:
        return {"type": "comparison_response_not_found"}
    if cache.reason is Reason.FULL_MATCH:
        return {"type": "cache_hit"}
    change = CHANGES.get(cache.reason)
    # The prompt has not changed, but some of its state was evicted or damaged.
    return {"type": "cache_miss", "reason": change, **missed} if change else {"type": "unavailable"}


log = logging.getLogger("rekindle.turn")

OPEN_RESPONSES = "open_responses"  # key in the application's state


@dataclass(frozen=True, slots=True)
class ResponseStorage:
    """Stores a response with the items that it answers, and adds them to its conversation."""

    runtime: RuntimeClient
    conversation: Conversation
    documents: DocumentClient
    conversations: ConversationStore
    is_stored: bool

    async def save(self, response: dict[str, Any]) -> None:
        """Store the response. If that fails, the response says so and is sent anyway."""
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
            self.runtime, response["id"], lines, response, ttl_s=STORED_S
        )

    async def _tried(self, saving: Awaitable[bool]) -> bool:
        try:
            return await saving
        except ServerError as error:
            log.warning("a response was not stored: %s", error.code)  # a message may contain a key
            return False


class ResponseReply(Reply):
    """The answer to one HTTP request. Another request may cancel it while it is computed."""

    keep_alive_s = 10.0

    def __init__(
        self,
        http: Request,
        runtime: RuntimeClient,
        request: GenerateRequest,
        body: ResponsesRequest,
        response: ResponseObject,
        items: ReplyItems,
        storage: ResponseStorage,
        *,
        others: Sequence[RuntimeClient],
        headers: Mapping[str, str],
    ) -> None:
        super().__init__(http, runtime, [request], others=others, headers=headers)
        self._body = body
        self._response = response
        self._items = items
        self._storage = storage
        self._open_responses: OpenResponses = getattr(http.state, OPEN_RESPONSES)
        self._key = request.salt, response.id
        self._numbers = count()
        self._has_output = False
        self._has_failed = False
        self._ended: dict[str, Any] | None = None  # the response
        self._cancelled: dict[str, Any] | None = None  # the response, ended by another request
        self._last_events: list[dict[str, Any]] = []  # of a cancelled stream

    async def respond(self, *, stream: bool) -> Response:
        self._open_responses[self._key] = self
        return await super().respond(stream=stream)

    def close(self) -> None:
        super().close()
        self._open_responses.pop(self._key, None)

    # -- requests of others --------------------------------------------------------------------

    def so_far(self) -> dict[str, Any]:
        """The response with its complete items."""
        begun = {**self._response.begun(), "output": self._items.so_far}
        return self._cancelled or self._ended or begun

    @property
    def input_lines(self) -> Lines:
        return self._storage.conversation.lines

    @property
    def _is_over(self) -> bool:
        return self._has_failed or bool(self.finished)

    async def cancel(self) -> dict[str, Any]:
        """End the response with what was generated so far, and return it."""
        if self._is_over:
            raise BadRequest("The response has just ended.", param="response_id")
        if self._cancelled is None:
            await self._storage.save(self._abandon())
        assert self._cancelled is not None
        return self._cancelled

    def discard(self) -> bool:
        """End the response and store nothing. Returns False if it is already ending."""
        if self._is_over or self._cancelled is not None:
            return False
        self._abandon().update(store=False, conversation=None)
        return True

    def _abandon(self) -> dict[str, Any]:
        """End the response with what was generated so far."""
        assert self._turns is not None
        self._last_events = self._items.close("incomplete")
        self._cancelled = self._response.ended("cancelled", self._items.items)
        self._turns.abandon()
        return self._cancelled

    # -- formatting ----------------------------------------------------------------------------

    def add(self, index: int, part: Part) -> None:
        self._items.add(part)

    async def body(self) -> dict[str, Any]:
        return self._cancelled or await self._end()

    def begin(self) -> bytes:
        response = self._response.begun()
        return b"".join(self._lifecycle(state, response) for state in ("created", "in_progress"))

    def chunks(self, index: int, event: Event) -> list[bytes]:
        match event:
            case Delta(_, part):
                self._has_output = True
                return [self._numbered(each) for each in self._items.add(part)]
            case Finished():
                return [self._numbered(each) for each in self._items.close(_status(event))]
        return []

    async def end(self) -> bytes:
        if self._cancelled is not None:
            chunks = [self._numbered(each) for each in self._last_events]
            return b"".join([*chunks, self._lifecycle("incomplete", self._cancelled)])
        response = await self._end()
        return self._lifecycle(response["status"], response)

    def keep_alive(self) -> bytes:
        """During prefill an event instead of a comment: some clients give up without any event."""
        if self._has_output:
            return sse_comment("ping")
        return self._lifecycle("in_progress", self._response.begun())

    def error_event(self, error: ServerError) -> bytes:
        self._has_failed = True
        return self._lifecycle("failed", self._response.failed(error, self._items.so_far))

    def is_streamed_error(self, error: ServerError) -> bool:
        """Clients look for a context overflow in the stream and shorten their conversation."""
        return error.code == ContextTooLong.code

    def _lifecycle(self, state: str, response: dict[str, Any]) -> bytes:
        return self._numbered({"type": f"response.{state}", "response": response})

    def _numbered(self, event: dict[str, Any]) -> bytes:
        event["sequence_number"] = next(self._numbers)
        return sse_event(event["type"], event)

    async def _end(self) -> dict[str, Any]:
        [finished] = self.finished
        self._items.close(_status(finished))
        options = self._body.prompt_cache_options
        fields: dict[str, Any] = {
            "usage": usage(finished, options.ttl if options else None),
            "x_cache": x_cache([finished]),
        }
        if options is not None and options.comparison_response_id is not None:
            compared = diagnostics(finished.prompt_tokens, finished.cache)
            fields["prompt_cache_diagnostics"] = compared
        response = self._response.ended(_status(finished), self._items.items, **fields)
        await self._storage.save(response)
        self._ended = response
        return response


#: The responses that are being computed, by tenant and id.
OpenResponses = dict[tuple[bytes, str], ResponseReply]


def _status(finished: Finished) -> str:
    return "incomplete" if finished.reason == "length" else "completed"
