"""Formats replies and errors of Ollama's API, whole or as lines of JSON."""

from __future__ import annotations

import json
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import orjson
from pydantic import BaseModel
from starlette.requests import Request

from rekindle.api.base.known_fields import IGNORED_FIELDS_HEADER
from rekindle.api.base.models import models_of
from rekindle.api.base.reply import (
    Reply,
    ignored_headers,
    is_complete,
    token_logprobs,
    x_cache,
)
from rekindle.api.ollama.keep_alive import is_ignored
from rekindle.api.ollama.request import Context
from rekindle.api.ollama.schema import RequestBase
from rekindle.errors import ServerError
from rekindle.http.middleware import received_s
from rekindle.http.responses import ErrorFormat, EventStream, documented
from rekindle.protocol.events import (
    ArgumentsDelta,
    AssistantMessage,
    Delta,
    Event,
    Part,
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
    ToolCall,
)
from rekindle.protocol.requests import GenerateRequest
from rekindle.worker.client import RuntimeClient

NS = 1_000_000_000  # in a second


class OllamaErrorBody(BaseModel):
    """The body of an error under /api, for the OpenAPI document."""

    error: str


def speaks_ollama(path: str) -> bool:
    """Whether a request expects errors in Ollama's form."""
    return path.startswith("/api/")


def line(payload: Mapping[str, Any]) -> bytes:
    """One line of a stream (NDJSON)."""
    return orjson.dumps(payload, option=orjson.OPT_APPEND_NEWLINE)


def error_body(error: ServerError) -> Mapping[str, Any]:
    return {"error": str(error)}


# What FastAPI documents for a route that streams by default.
RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Lines of NDJSON, or with `stream: false` the whole answer",
        "content": {"application/x-ndjson": {"schema": {"type": "string"}}},
    },
    **documented(400, model=OllamaErrorBody),
}
OLLAMA_ERRORS = ErrorFormat(body=error_body, event=lambda error: line(error_body(error)))


class LineStream(EventStream):
    media_type = "application/x-ndjson"


class OllamaReply(Reply):
    """What /api/chat and /api/generate have in common. The subclasses format a message."""

    stream_class = LineStream
    # Longest time without a line while the arguments of a call are generated.
    max_silence_s = 1.0

    def __init__(
        self,
        http: Request,
        runtime: RuntimeClient,
        request: GenerateRequest,
        body: RequestBase,
        context: Context | None = None,
    ) -> None:
        ignored = list(body.ignored_fields)
        if is_ignored(models_of(http), runtime, body.keep_alive):
            ignored.append("keep_alive")
        headers = ignored_headers({IGNORED_FIELDS_HEADER: ignored})
        super().__init__(http, runtime, [request], headers=headers)
        self._model = body.model or runtime.name
        self._context = context
        self._message = AssistantMessage()
        self._calls_sent = 0
        self._last_line_s = 0.0

    @staticmethod
    @abstractmethod
    def message(
        text: str = "", thinking: str | None = None, calls: Sequence[dict[str, Any]] = ()
    ) -> dict[str, Any]:
        """Format a whole message or a part of one."""

    def add(self, index: int, part: Part) -> None:
        self._message.add(part)

    async def body(self) -> dict[str, Any]:
        reply = self._message
        message = self.message(reply.text, reply.reasoning, calls(self._whole()))
        whole = {**message, **_logprobs(reply.logprobs)}
        return stamped(self._model, {**whole, **await self._end()})

    def chunks(self, index: int, event: Event) -> list[bytes]:
        if not isinstance(event, Delta):
            return []
        self._message.add(event.part)
        return [self._line(fields) for fields in self._fields(event.part)]

    async def end(self) -> bytes:
        last = {**self.message(), **await self._end()}
        return b"".join(self._line(fields) for fields in [*self._whole_calls(), last])

    def keep_alive(self) -> bytes:
        return self._line(self.message())

    def _fields(self, part: Part) -> list[dict[str, Any]]:
        match part:
            case TextDelta(text, logprobs):
                return [*self._whole_calls(), {**self.message(text), **_logprobs(logprobs)}]
            case ReasoningDelta(text):
                return [*self._whole_calls(), self.message(thinking=text)]
            case ArgumentsDelta() if time.monotonic() - self._last_line_s > self.max_silence_s:
                return [self.message()]  # a call is sent whole, which may take long
        return self._whole_calls(unfinished=1)

    def _whole(self) -> list[ToolCall]:
        """The calls of the reply. One that was cut off is left out."""
        made, [finished] = self._message.tool_calls, self.finished
        is_cut = finished.reason != "tool_calls" and made and not is_complete(made[-1].arguments)
        return made[:-1] if is_cut else made

    def _whole_calls(self, unfinished: int = 0) -> list[dict[str, Any]]:
        """The calls that were not sent, except for the last `unfinished` ones."""
        made = self._message.tool_calls if self.finished == [] else self._whole()
        done = made[self._calls_sent : len(made) - unfinished]
        first, self._calls_sent = self._calls_sent, self._calls_sent + len(done)
        return [self.message(calls=calls(done, first))] if done else []

    def _line(self, fields: dict[str, Any]) -> bytes:
        self._last_line_s = time.monotonic()
        return line(stamped(self._model, {"done": False, **fields}))

    async def _end(self) -> dict[str, Any]:
        [finished] = self.finished
        return {
            "done": True,
            "done_reason": "length" if finished.reason == "length" else "stop",
            **(await self._context.after(self._message.text) if self._context else {}),
            "total_duration": int((time.monotonic() - received_s(self._http)) * NS),
            "load_duration": 0,
            "prompt_eval_count": finished.prompt_tokens,
            "prompt_eval_duration": int(finished.prompt_eval_s * NS),
            "eval_count": finished.completion_tokens,
            "eval_duration": int(finished.completion_s * NS),
            "x_cache": x_cache([finished]),
        }


class ChatReply(OllamaReply):
    """/api/chat."""

    @staticmethod
    def message(
        text: str = "", thinking: str | None = None, calls: Sequence[dict[str, Any]] = ()
    ) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if thinking:
            message["thinking"] = thinking
        if calls:
            message["tool_calls"] = calls
        return {"message": message}


class GenerateReply(OllamaReply):
    """/api/generate, whose replies call no tools."""

    @staticmethod
    def message(
        text: str = "", thinking: str | None = None, calls: Sequence[dict[str, Any]] = ()
    ) -> dict[str, Any]:
        return {"response": text, **({"thinking": thinking} if thinking else {})}


def utc(time: datetime) -> str:
    return time.isoformat().replace("+00:00", "Z")


def _logprobs(logprobs: list[TokenLogprob] | None) -> dict[str, Any]:
    return {"logprobs": token_logprobs(logprobs)} if logprobs else {}


def stamped(model: str, fields: dict[str, Any]) -> dict[str, Any]:
    return {"model": model, "created_at": utc(datetime.now(UTC)), **fields}


def calls(made: list[ToolCall], first: int = 0) -> list[dict[str, Any]]:
    return [
        {"function": {"index": index, "name": call.name, "arguments": _arguments(call)}}
        for index, call in enumerate(made, first)
    ]


def _arguments(call: ToolCall) -> dict[str, Any]:
    """Parse a call's arguments. Anything but an object is dropped, because Ollama's arguments are
    one."""
    try:
        found = json.loads(call.arguments)
    except json.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}
