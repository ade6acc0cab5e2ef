"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from rekindle.api.base.images import illustrate
from rekindle.api.base.models import ModelNumber, models_of
from rekindle.api.base.names import all_with_affinity
from rekindle.api.base.report import token_logprobs
from rekindle.api.openai.reply import Answer, Choice
from rekindle.api.openai.request import chat_requests
from rekindle.api.openai.schema import ChatRequest
from rekindle.http.auth import caller_of
from rekindle.http.body import JsonRoute, run_off_loop
from rekindle.http.responses import MAY_STREAM
from rekindle.protocol.events import (
    ArgumentsDelta,
    Finished,
    Part,
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
    ToolCall,
    ToolCallStart,
)

router = APIRouter(route_class=JsonRoute, tags=["chat"])


@router.post("/v1/chat/completions", responses=MAY_STREAM)
async def create_chat_completion(
    body: ChatRequest, request: Request, number: ModelNumber = None
) -> Response:
    """Answer a conversation; everything computed for an equal prefix before is reused."""
    models = models_of(request)
    runtime = models.runtime(body.model, number)
    salt = caller_of(request).salt
    illustrated = await illustrate(request, runtime, body.messages, body.resize)
    requests = await run_off_loop(request, chat_requests, body, models.config, salt, illustrated)
    requests = all_with_affinity(request, requests)
    answer = Answer(runtime, requests, body, ChatFormat(), others=models.others(runtime))
    return await answer.respond(request)


class ChatFormat:
    id_prefix = "chatcmpl"
    whole = "chat.completion"
    chunk = "chat.completion.chunk"

    def opening(self, index: int, *, calls: bool) -> dict[str, Any] | None:
        return _delta(index, {"role": "assistant", "content": None if calls else ""})

    def delta(self, index: int, part: Part) -> dict[str, Any]:
        choice = _delta(index, _fields(part))
        if isinstance(part, TextDelta) and part.logprobs is not None:
            choice["logprobs"] = _logprobs(part.logprobs)
        return choice

    def closing(self, index: int, finished: Finished) -> dict[str, Any]:
        return {**_delta(index, _message_id(finished)), "finish_reason": finished.reason}

    def choice(self, index: int, choice: Choice) -> dict[str, Any]:
        assert choice.finished is not None
        message = choice.message
        return {
            "index": index,
            "message": {**message.as_dict(), "refusal": None, **_message_id(choice.finished)},
            "logprobs": _logprobs(message.logprobs) if message.logprobs else None,
            "finish_reason": choice.finished.reason,
        }


def _fields(part: Part) -> dict[str, Any]:
    """The fields of a delta that one part of a reply becomes."""
    match part:
        case TextDelta():
            return {"content": part.text}
        case ReasoningDelta():
            return {"reasoning_content": part.text}
        case ToolCallStart():
            call = ToolCall(part.id, part.name).as_dict()
            return {"tool_calls": [{"index": part.index, **call}]}
        case ArgumentsDelta():
            return {"tool_calls": [{"index": part.index, "function": {"arguments": part.text}}]}


def _message_id(finished: Finished) -> dict[str, str]:
    return {} if finished.message_id is None else {"message_id": finished.message_id}


def _delta(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _logprobs(logprobs: list[TokenLogprob]) -> dict[str, Any]:
    return {"content": token_logprobs(logprobs), "refusal": None}
