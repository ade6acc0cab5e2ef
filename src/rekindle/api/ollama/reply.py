"""Events of a turn as one answer of Ollama's API, whole or a line at a time."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Protocol

import orjson
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from rekindle.api.base.report import log_line, x_cache
from rekindle.api.base.turns import Turns, while_connected
from rekindle.errors import ServerError
from rekindle.http.middleware import received_s
from rekindle.http.responses import ErrorFormat, EventStream, JsonResponse, documented
from rekindle.protocol.events import (
    ArgumentsDelta,
    AssistantMessage,
    Delta,
    Event,
    Finished,
    Part,
    ReasoningDelta,
    TextDelta,
    ToolCall,
)
from rekindle.protocol.requests import GenerateRequest
from rekindle.worker.client import RuntimeClient

# ----------------------------------------------------------------------
# Errors in Ollama's shape, and the lines of its streams.

ROOT = "/api/"


class OllamaErrorBody(BaseModel):
    """The body of every error under /api, for the OpenAPI page."""

    error: str


def speaks_ollama(path: str) -> bool:
    """Whether a request is in this dialect."""
    return path.startswith(ROOT)


def line(payload: Mapping[str, Any]) -> bytes:
    """One line of a stream: NDJSON."""
    return orjson.dumps(payload, option=orjson.OPT_APPEND_NEWLINE)


def error_body(error: ServerError) -> Mapping[str, Any]:
    return {"error": str(error)}


# The answers of a route that streams unless it is asked not to, as FastAPI takes them.
RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Its lines as NDJSON; with `stream: false` the whole answer",
        "content": {"application/x-ndjson": {"schema": {"type": "string"}}},
    },
    **documented(400, model=OllamaErrorBody),
}
OLLAMA_ERRORS = ErrorFormat(body=error_body, event=lambda error: line(error_body(error)))


log = logging.getLogger("rekindle.turn")

NS = 1_000_000_000
SIGN_OF_LIFE_S = 1.0  # at most this long without a line while the arguments of a call are written


class LineStream(EventStream):
    media_type = "application/x-ndjson"


class AnswerFormat(Protocol):
    """How one endpoint writes a reply."""

    def text(self, text: str) -> dict[str, Any]: ...

    def thinking(self, text: str) -> dict[str, Any]: ...

    def whole(self, message: AssistantMessage) -> dict[str, Any]: ...


class ChatFormat:
    """/api/chat."""

    def text(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text}}

    def thinking(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": "", "thinking": text}}

    def whole(self, message: AssistantMessage) -> dict[str, Any]:
        fields = {"role": "assistant", "content": message.text}
        if message.reasoning:
            fields["thinking"] = message.reasoning
        if message.tool_calls:
            return {"message": {**fields, "tool_calls": calls(message.tool_calls)}}
        return {"message": fields}


class GenerateFormat:
    """/api/generate."""

    def text(self, text: str) -> dict[str, Any]:
        return {"response": text}

    def thinking(self, text: str) -> dict[str, Any]:
        return {"response": "", "thinking": text}

    def whole(self, message: AssistantMessage) -> dict[str, Any]:
        thinking = {"thinking": message.reasoning} if message.reasoning else {}
        return {"response": message.text, **thinking}


async def nothing_more(_message: AssistantMessage) -> dict[str, Any]:
    return {}


class Answer:
    """The answer to one HTTP request; `more`: fields that its end has, when the reply is known."""

    def __init__(
        self,
        runtime: RuntimeClient,
        request: GenerateRequest,
        format: AnswerFormat,
        model: str,
        more: Callable[[AssistantMessage], Awaitable[dict[str, Any]]] = nothing_more,
    ) -> None:
        self._runtime = runtime
        self._request = request
        self._format = format
        self._model = model
        self._more = more
        self._message = AssistantMessage()
        self._calls_sent = 0
        self._last_line_s = 0.0

    async def respond(self, http: Request, *, streams: bool) -> Response:
        return await (self._streamed(http) if streams else self._whole(http))

    async def _whole(self, http: Request) -> Response:
        with contextlib.closing(self._turns(http)) as turns:
            finished = await while_connected(http, self._collect(turns))
        end = await self._end(finished, received_s(http))
        return JsonResponse(stamped(self._model, {**self._format.whole(self._message), **end}))

    async def _collect(self, turns: Turns) -> Finished:
        while True:
            _, event = await turns.next()
            match event:
                case Delta(_, part):
                    self._message.add(part)
                case Finished():
                    return event

    async def _streamed(self, http: Request) -> Response:
        turns = self._turns(http)
        try:
            begun = await while_connected(http, turns.begun())
        except BaseException:
            turns.close()
            raise
        return LineStream(self._stream(turns, begun, received_s(http)), turns.close)

    async def _stream(
        self, turns: Turns, begun: list[tuple[int, Event]], began_s: float
    ) -> AsyncGenerator[bytes, None]:
        for _, event in begun:
            if lines := await self._lines(event, began_s):
                yield b"".join(lines)
        while turns.open:
            if lines := await self._lines((await turns.next())[1], began_s):
                yield b"".join(lines)

    async def _lines(self, event: Event, began_s: float) -> list[bytes]:
        match event:
            case Delta(_, part):
                self._message.add(part)
                return [self._line(fields) for fields in self._fields(part)]
            case Finished():
                end = {**self._format.text(""), **await self._end(event, began_s)}
                return [self._line(fields) for fields in [*self._called(), end]]
        return []

    def _fields(self, part: Part) -> list[dict[str, Any]]:
        match part:
            case TextDelta(text):
                return [*self._called(), self._format.text(text)]
            case ReasoningDelta(text):
                return [*self._called(), self._format.thinking(text)]
            case ArgumentsDelta() if time.monotonic() - self._last_line_s > SIGN_OF_LIFE_S:
                return [self._format.text("")]  # a call is sent whole, and may take its time
        return self._called(but=1)

    def _called(self, but: int = 0) -> list[dict[str, Any]]:
        """The calls that are whole and were not sent; `but`: the last ones are being written."""
        done = self._message.tool_calls[self._calls_sent : len(self._message.tool_calls) - but]
        first, self._calls_sent = self._calls_sent, self._calls_sent + len(done)
        if not done:
            return []
        message = {"role": "assistant", "content": "", "tool_calls": calls(done, first)}
        return [{"message": message}]

    def _line(self, fields: dict[str, Any]) -> bytes:
        self._last_line_s = time.monotonic()
        return line(stamped(self._model, {"done": False, **fields}))

    async def _end(self, finished: Finished, began_s: float) -> dict[str, Any]:
        log.info("%s", log_line(finished))
        return {
            "done": True,
            "done_reason": "length" if finished.reason == "length" else "stop",
            **await self._more(self._message),
            "total_duration": int((time.monotonic() - began_s) * NS),
            "load_duration": 0,
            "prompt_eval_count": finished.prompt_tokens,
            "prompt_eval_duration": int(finished.prompt_eval_s * NS),
            "eval_count": finished.completion_tokens,
            "eval_duration": int(finished.completion_s * NS),
            "x_cache": x_cache([finished]),
        }

    def _turns(self, http: Request) -> Turns:
        return Turns(self._runtime, [self._request], received_s(http))


def stamped(model: str, fields: dict[str, Any]) -> dict[str, Any]:
    created_at = datetime.now(UTC).isoformat().replace("+00:00", "Z")
    return {"model": model, "created_at": created_at, **fields}


def calls(made: list[ToolCall], first: int = 0) -> list[dict[str, Any]]:
    return [
        {"function": {"index": index, "name": call.name, "arguments": _arguments(call)}}
        for index, call in enumerate(made, first)
    ]


def _arguments(call: ToolCall) -> dict[str, Any]:
    """Ollama's are an object; what a reply that was cut off left of one cannot be."""
    try:
        found = json.loads(call.arguments)
    except json.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}
