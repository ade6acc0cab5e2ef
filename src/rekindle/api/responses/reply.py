"""Events of a turn as one response, whole or streamed."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from rekindle.api.base.admin import refine_report
from rekindle.api.base.report import log_line, x_cache
from rekindle.api.base.turns import Turns, while_connected
from rekindle.api.responses.conversations import ConversationStore
from rekindle.api.responses.output import ReplyItems
from rekindle.api.responses.request import KEPT_S, Conversation
from rekindle.api.responses.response import ResponseObject, usage
from rekindle.api.responses.schema import ResponsesRequest
from rekindle.api.responses.stored import (
    OPEN_RESPONSES,
    DocumentClient,
    Lines,
    OpenResponses,
    as_lines,
)
from rekindle.errors import BadRequest, ContextTooLong, ServerError, Unavailable
from rekindle.http.middleware import received_s
from rekindle.http.responses import EventStream, JsonResponse, SignOfLife, sse_comment, sse_event
from rekindle.protocol.events import CacheReport, Delta, Event, Finished, Reason
from rekindle.protocol.requests import GenerateRequest
from rekindle.worker.client import RuntimeClient

# ----------------------------------------------------------------------
# `prompt_cache_diagnostics`: what has changed since a response that the client names.

CHANGES = {
    Reason.SYSTEM_CHANGED: "input_changed",
    Reason.TOOLS_CHANGED: "tools_changed",
    Reason.TURN_CHANGED: "input_changed",
    Reason.PREFIX_CHANGED: "input_changed",
    Reason.REQUEST_SHORTER: "input_changed",
    Reason.MODEL_MISMATCH: "model_changed",
}


def diagnostics(prompt_tokens: int, cache: CacheReport) -> dict[str, Any]:
    """Of a turn that was compared with the response."""
    missed = {
        "cache_missed_tokens": prompt_tokens - cache.reused_tokens,
        "comparison_reusable_tokens": cache.reused_tokens,
    }
    if cache.cache_key is None and cache.reason is not Reason.MODEL_MISMATCH:
        return {"type": "comparison_response_not_found"}
    if cache.reason is Reason.FULL_MATCH:
        return {"type": "cache_hit"}
    change = CHANGES.get(cache.reason)
    # Nothing has changed, and yet not all of it was there: it was evicted, or was damaged.
    return {"type": "cache_miss", "reason": change, **missed} if change else {"type": "unavailable"}


# ----------------------------------------------------------------------
# What is stored of a response when it ends, and where.

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


PING_S = 10.0  # of silence
PING = sse_comment("ping")


class Answer:
    """The answer to one HTTP request."""

    def __init__(
        self,
        runtime: RuntimeClient,
        request: GenerateRequest,
        body: ResponsesRequest,
        response: ResponseObject,
        items: ReplyItems,
        record: Record,
        *,
        others: Sequence[RuntimeClient],
        headers: dict[str, str],
    ) -> None:
        """`others`: models that may have the state which is named."""
        self._runtime = runtime
        self._request = request
        self._body = body
        self._response = response
        self._items = items
        self._record = record
        self._others = others
        self._headers = headers
        self._numbers = count()
        self._has_output = False
        self._turns: Turns | None = None
        self._is_over = False
        self._finished: dict[str, Any] | None = None
        self._cancelled: dict[str, Any] | None = None  # the response, ended by another request
        self._last_events: list[dict[str, Any]] = []  # of its stream

    async def respond(self, http: Request) -> Response:
        """Whole, or streamed."""
        tenant, key = self._request.salt, self._response.id
        being_computed: OpenResponses = getattr(http.state, OPEN_RESPONSES)
        self._turns = turns = Turns(self._runtime, [self._request], received_s(http))

        def close() -> None:
            turns.close()
            being_computed.drop(tenant, key)

        being_computed.add(tenant, key, self)
        try:
            if self._body.stream:
                return await self._streamed(http, turns, close)
            response = await while_connected(http, self._collect(turns))
        except BaseException:
            close()
            raise
        close()
        return JsonResponse(response, headers=self._headers)

    def so_far(self) -> dict[str, Any]:
        """The response, with the items that are whole."""
        begun = {**self._response.begun(), "output": self._items.so_far}
        return self._cancelled or self._finished or begun

    @property
    def input_lines(self) -> Lines:
        return self._record.conversation.lines

    async def cancel(self) -> dict[str, Any]:
        if self._is_over:
            raise BadRequest("The response has just ended.", param="response_id")
        if self._cancelled is None:
            await self._record.save(self._given_up())
        assert self._cancelled is not None
        return self._cancelled

    def discard(self) -> bool:
        if self._is_over or self._cancelled is not None:
            return False
        self._given_up().update(store=False, conversation=None)
        return True

    def _given_up(self) -> dict[str, Any]:
        """The response, as far as it has come."""
        assert self._turns is not None
        self._last_events = self._items.close("incomplete")
        self._cancelled = self._response.ended("cancelled", self._items.items)
        self._turns.give_up()
        return self._cancelled

    # -- whole ---------------------------------------------------------------------------------

    async def _collect(self, turns: Turns) -> dict[str, Any]:
        while True:
            event = await self._next(turns)
            match event:
                case None:
                    return await self.cancel()
                case Delta(_, part):
                    self._items.add(part)
                case Finished():
                    self._items.close(_status(event))
                    return await self._ended(event)

    # -- streamed ------------------------------------------------------------------------------

    async def _streamed(self, http: Request, turns: Turns, close: Callable[[], None]) -> Response:
        try:
            begun = await while_connected(http, turns.begun_within(PING_S))
            chunks = self._stream(turns, begun)
        except ServerError as error:
            if error.code != ContextTooLong.code:
                raise
            # Clients look for this one in the stream, and make their conversation shorter.
            chunks = self._refused(error)
        sign_of_life = SignOfLife(PING_S, self._sign_of_life)
        return EventStream(chunks, close, self._headers, self._failed, sign_of_life)

    async def _refused(self, error: ServerError) -> AsyncGenerator[bytes, None]:
        self._is_over = True
        for chunk in self._beginning():
            yield chunk
        yield self._failed(error)

    async def _stream(
        self, turns: Turns, begun: list[tuple[int, Event]]
    ) -> AsyncGenerator[bytes, None]:
        for chunk in self._beginning():
            yield chunk
        first = deque(event for _, event in begun)
        while self._cancelled is None and (first or turns.open):
            event = first.popleft() if first else await self._next(turns)
            if event is None:
                break
            for chunk in self._chunks(event):
                yield chunk
            if isinstance(event, Finished):
                response = await self._ended(event)
                yield self._lifecycle(response["status"], response)
        if self._cancelled is not None:
            for each in self._last_events:
                yield self._numbered(each)
            yield self._lifecycle("incomplete", self._cancelled)

    def _chunks(self, event: Event) -> list[bytes]:
        match event:
            case Delta(_, part):
                self._has_output = True
                return [self._numbered(each) for each in self._items.add(part)]
            case Finished():
                self._is_over = True  # before any of these is sent: no other may end it now
                return [self._numbered(each) for each in self._items.close(_status(event))]
        return []

    def _beginning(self) -> list[bytes]:
        response = self._response.begun()
        return [self._lifecycle(state, response) for state in ("created", "in_progress")]

    def _sign_of_life(self) -> bytes:
        """While a long prompt is read, an event: some clients give up without any."""
        return PING if self._has_output else self._lifecycle("in_progress", self._response.begun())

    def _failed(self, error: ServerError) -> bytes:
        """How an error ends the stream."""
        self._is_over = True
        return self._lifecycle("failed", self._response.failed(error, self._items.so_far))

    def _lifecycle(self, state: str, response: dict[str, Any]) -> bytes:
        return self._numbered({"type": f"response.{state}", "response": response})

    def _numbered(self, event: dict[str, Any]) -> bytes:
        event["sequence_number"] = next(self._numbers)
        return sse_event(event["type"], event)

    # -- both ----------------------------------------------------------------------------------

    async def _next(self, turns: Turns) -> Event | None:
        """None: another request has cancelled it."""
        try:
            _, event = await turns.next()
        except Unavailable:
            if self._cancelled is None:
                raise
            return None
        return None if self._cancelled is not None else event

    async def _ended(self, finished: Finished) -> dict[str, Any]:
        """The response as it is shown, and kept if it is to be."""
        self._is_over = True
        log.info("%s", log_line(finished))
        await refine_report([finished], self._request, self._others)
        options = self._body.prompt_cache_options
        fields: dict[str, Any] = {
            "usage": usage(finished, options.ttl if options else None),
            "x_cache": x_cache([finished]),
        }
        if options is not None and options.comparison_response_id is not None:
            compared = diagnostics(finished.prompt_tokens, finished.cache)
            fields["prompt_cache_diagnostics"] = compared
        response = self._response.ended(_status(finished), self._items.items, **fields)
        await self._record.save(response)
        self._finished = response
        return response


def _status(finished: Finished) -> str:
    return "incomplete" if finished.reason == "length" else "completed"
