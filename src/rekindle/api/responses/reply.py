"""Formats a reply as a response, whole or streamed, and stores it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import AsyncExitStack
from itertools import count
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from rekindle.api.base.admin import durability
from rekindle.api.base.documents import STORED_S, DocumentClient, Stored, as_lines, tried
from rekindle.api.base.loading import uses_of
from rekindle.api.base.models import models_of
from rekindle.api.base.reply import Reply, Turns, x_cache
from rekindle.api.responses.background import (
    BACKGROUND,
    BackgroundResponses,
    EventLog,
    stream_of,
)
from rekindle.api.responses.conversations import ConversationStore
from rekindle.api.responses.errors import NoRoomForResponse
from rekindle.api.responses.output import ReplyItems
from rekindle.api.responses.request import Conversation
from rekindle.api.responses.response import ResponseObject, usage
from rekindle.api.responses.schema import ResponsesRequest
from rekindle.api.responses.stored import lane_of
from rekindle.errors import BadRequest, ContextTooLong, ServerError
from rekindle.http.body import body_of
from rekindle.http.middleware import received_s
from rekindle.http.responses import JsonResponse, sse_comment, sse_event
from rekindle.protocol.events import CacheReport, Delta, Event, Finished, Part, Reason, Started
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
    if cache.reason in (Reason.CACHE_KEY_NOT_FOUND, Reason.EXPIRED):
        return {"type": "comparison_response_not_found"}
    if cache.reason is Reason.FULL_MATCH:
        return {"type": "cache_hit"}
    change = CHANGES.get(cache.reason)
    # The prompt has not changed, but some of its state was evicted or damaged.
    return {"type": "cache_miss", "reason": change, **missed} if change else {"type": "unavailable"}


logger = logging.getLogger("rekindle.api")

OPEN_RESPONSES = "open_responses"  # key in the application's state


class ResponseReply(Reply):
    """The answer to one HTTP request. Another request may cancel it while it is computed."""

    def __init__(
        self,
        http: Request,
        runtime: RuntimeClient,
        request: GenerateRequest,
        body: ResponsesRequest,
        conversation: Conversation,
        response: ResponseObject,
        *,
        headers: Mapping[str, str],
    ) -> None:
        others = models_of(http).others(runtime)
        super().__init__(http, runtime, [request], others=others, headers=headers)
        self.conversation = conversation
        self._body = body
        self._response = response
        self._items = ReplyItems(
            response.number, conversation.toolbox, seals_reasoning=body.seals_reasoning
        )
        self._open_responses: OpenResponses = getattr(http.state, OPEN_RESPONSES)
        self._key = request.salt, response.id
        self._numbers = count()
        self._has_output = False
        self._has_failed = False
        self._ended: dict[str, Any] | None = None  # the response
        self._cancelled: dict[str, Any] | None = None  # the response, ended by another request
        self._is_queued = bool(body.background)  # only background responses show it
        self._last_events: list[dict[str, Any]] = []  # of a cancelled stream

    async def respond(self, *, stream: bool) -> Response:
        self._open_responses[self._key] = self
        return await super().respond(stream=stream)

    async def respond_in_background(self, *, stream: bool) -> Response:
        """Start the turn, which continues without its client, and store the response as queued.

        Raises an error if the response could not be stored.
        """
        background: BackgroundResponses = getattr(self._http.state, BACKGROUND)
        queued, log = self._response.begun("queued"), EventLog()
        self._turns = turns = Turns(self._runtime, self._requests, received_s(self._http))
        try:
            saved = await DocumentClient(self._http).save(
                self._runtime, queued["id"], self.conversation.lines, queued, ttl_s=STORED_S
            )
            if not saved.kept:
                raise NoRoomForResponse
        except BaseException:
            self.close()
            raise
        self._open_responses[self._key] = self
        uses = uses_of(self._http).pop_all()  # the model stays loaded until the response ends
        background.start(self._key, log, self._run(turns, log, uses))
        if stream:
            return stream_of(log.after(None), self._headers)
        return JsonResponse(queued, headers=self._headers)

    async def _run(self, turns: Turns, log: EventLog, uses: AsyncExitStack) -> None:
        """Write all events of the response, the last of which ends it."""
        try:
            with body_of(self._http).holding(self.conversation.size_bytes, refuses=False):
                async for chunk in self._chunks(turns, []):
                    log.add(chunk)
        except ServerError as error:
            await self._fail(error, log)
        except Exception:
            logger.exception("unexpected error in a background response")
            await self._fail(ServerError("an unexpected error ended this response"), log)
        finally:
            self.close()
            log.end()
            await uses.aclose()

    async def _fail(self, error: ServerError, log: EventLog) -> None:
        log.add(self.error_event(error))
        await self._store(self._response.failed(error, self._items.so_far))

    def close(self) -> None:
        super().close()
        self._open_responses.pop(self._key, None)

    # -- requests of others --------------------------------------------------------------------

    def so_far(self) -> dict[str, Any]:
        """The response with its complete items."""
        begun = {**self._response.begun(self._status), "output": self._items.so_far}
        return self._cancelled or self._ended or begun

    @property
    def _status(self) -> str:
        return "queued" if self._is_queued else "in_progress"

    @property
    def _is_over(self) -> bool:
        return self._has_failed or bool(self.finished)

    async def cancel(self) -> dict[str, Any]:
        """End the response with what was generated so far, and return it."""
        if self._is_over:
            raise BadRequest("The response has just ended.", param="response_id")
        if self._cancelled is None:
            await self._save(self._abandon())
        assert self._cancelled is not None
        return self._cancelled

    @property
    def has_ended(self) -> bool:
        """Whether the response has its last state. The client may not have received it yet."""
        return self._has_failed or bool(self._cancelled or self._ended)

    @property
    def is_background(self) -> bool:
        return bool(self._body.background)

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

    async def _save(self, response: dict[str, Any]) -> None:
        """Add the response to its conversation, and store it.

        If that fails, the response says so and is sent anyway.
        """
        in_memory = dict[str, Any]()
        if response["conversation"] is not None:
            lines = (*self.conversation.own_lines, *as_lines(response["output"]))
            store = ConversationStore(self._http, refuses=False)
            added = await tried(store.append(response["conversation"]["id"], lines))
            if added is None:
                response["conversation"] = None
            else:
                in_memory |= added.durability
        if self._body.is_stored:
            in_memory |= await self._store(response)
        elif lane := lane_of(self._http):
            lines = self.conversation.lines
            lane.keep(Stored(response["id"], self._runtime, lines, response))
        response.update(in_memory)  # last, because it is about this request only

    async def _store(self, response: dict[str, Any]) -> dict[str, Any]:
        """Store the response with the items that it answers. Returns its durability."""
        saving = DocumentClient(self._http).save(
            self._runtime, response["id"], self.conversation.lines, response, ttl_s=STORED_S
        )
        saved = await tried(saving)
        response["store"] = saved is not None and saved.kept
        return durability(saved) if saved and saved.kept else {}

    # -- formatting ----------------------------------------------------------------------------

    def add(self, index: int, part: Part) -> None:
        self._items.add(part)

    async def body(self) -> dict[str, Any]:
        return self._cancelled or await self._end()

    def begin(self) -> bytes:
        response = self._response.begun(self._status)
        return self._lifecycle("created", response) + self._lifecycle(self._status, response)

    def chunks(self, index: int, event: Event) -> list[bytes]:
        match event:
            case Delta(_, part):
                self._has_output = True
                return self._numbered(self._items.add(part))
            case Started() if self._is_queued:
                self._is_queued = False
                return [self._lifecycle("in_progress", self._response.begun())]
            case Finished():
                return self._numbered(self._close_items(event))
        return []

    async def end(self) -> bytes:
        if self._cancelled is not None:
            chunks = self._numbered(self._last_events)
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
        [chunk] = self._numbered([{"type": f"response.{state}", "response": response}])
        return chunk

    def _numbered(self, events: list[dict[str, Any]]) -> list[bytes]:
        for event in events:
            event["sequence_number"] = next(self._numbers)
        return [sse_event(event["type"], event) for event in events]

    def _close_items(self, finished: Finished) -> list[dict[str, Any]]:
        """End the open item. An open call was cut off, unless the reply ends with calls."""
        return self._items.close(_status(finished), is_cut=finished.reason != "tool_calls")

    async def _end(self) -> dict[str, Any]:
        [finished] = self.finished
        self._close_items(finished)
        options = self._body.prompt_cache_options
        fields: dict[str, Any] = {
            "usage": usage(finished, options.ttl if options else None),
            "x_cache": x_cache([finished]),
        }
        if options is not None and options.comparison_response_id is not None:
            compared = diagnostics(finished.prompt_tokens, finished.cache)
            fields["prompt_cache_diagnostics"] = compared
        response = self._response.ended(_status(finished), self._items.items, **fields)
        await self._save(response)
        self._ended = response
        return response


#: The responses that are being computed, by tenant and id.
OpenResponses = dict[tuple[bytes, str], ResponseReply]


def _status(finished: Finished) -> str:
    return "incomplete" if finished.reason == "length" else "completed"
