"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from rekindle.api.openai import tool_choice
from rekindle.api.openai.answer import Answer, finite
from rekindle.api.openai.choice import Choice
from rekindle.api.openai.defaults import asks
from rekindle.api.openai.message import rendered
from rekindle.api.openai.schema import ChatRequest
from rekindle.api.openai.tool import described
from rekindle.config import Config
from rekindle.protocol.events import (
    ArgumentsDelta,
    Finished,
    Part,
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
    ToolCallStart,
)
from rekindle.protocol.message import ToolCall
from rekindle.protocol.requests import GenerateRequest
from rekindle.server.auth import salt_of
from rekindle.server.json import OrjsonRoute
from rekindle.server.service import ModelNumber, Service

router = APIRouter(route_class=OrjsonRoute, tags=["chat"])


@router.post("/v1/chat/completions")
async def create_chat_completion(
    body: ChatRequest, request: Request, number: ModelNumber = None
) -> Response:
    """Answer a conversation; everything computed for an equal prefix before is reused."""
    service: Service = request.state.service
    runtime = service.runtime(body.model, number)
    turns = chat_asks(body, service.config, salt_of(request))
    answer = Answer(runtime, turns, body, ChatShape(), others=service.others(runtime))
    return await answer.respond(request)


def chat_asks(body: ChatRequest, config: Config, salt: bytes) -> list[GenerateRequest]:
    """The turns that a conversation's request asks for, one for each choice."""
    conversation = {
        "messages": rendered(body.messages),
        "template_kwargs": _template_kwargs(body),
        "tools": described(tool_choice.offered(body.tool_choice, body.tools)),
        "tool_use": tool_choice.tool_use(
            body.tool_choice, parallel=body.parallel_tool_calls is not False
        ),
        "structured_output": body.response_format.structure if body.response_format else None,
        "progress": body.progress is not None,
    }
    return asks(
        body,
        config,
        salt,
        [conversation],
        max_tokens=body.max_completion_tokens or body.max_tokens,
        top_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )


def _template_kwargs(body: ChatRequest) -> dict[str, Any]:
    kwargs = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", body.reasoning_effort)
    return kwargs


class ChatShape:
    id_prefix = "chatcmpl"
    whole = "chat.completion"
    chunk = "chat.completion.chunk"

    def opening(self, index: int, *, calls: bool) -> dict[str, Any] | None:
        return _delta(index, {"role": "assistant", "content": None if calls else ""})

    def delta(self, index: int, part: Part) -> dict[str, Any]:
        choice = _delta(index, _piece(part))
        if isinstance(part, TextDelta) and part.logprobs is not None:
            choice["logprobs"] = _logprobs(part.logprobs)
        return choice

    def closing(self, index: int, finished: Finished) -> dict[str, Any]:
        return {**_delta(index, _message_id(finished)), "finish_reason": finished.reason}

    def choice(self, index: int, answer: Choice) -> dict[str, Any]:
        assert answer.finished is not None
        message = answer.message
        return {
            "index": index,
            "message": {"refusal": None, **message.as_dict(), **_message_id(answer.finished)},
            "logprobs": _logprobs(message.logprobs) if message.logprobs else None,
            "finish_reason": answer.finished.reason,
        }


def _piece(part: Part) -> dict[str, Any]:
    """What one part adds to a message."""
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
    return {
        "content": [
            {
                **_token(token.piece, token.logprob),
                "top_logprobs": [_token(piece, logprob) for piece, logprob in token.top],
            }
            for token in logprobs
        ],
        "refusal": None,
    }


def _token(piece: bytes, logprob: float) -> dict[str, Any]:
    return {
        "token": piece.decode(errors="replace"),
        "logprob": finite(logprob),
        "bytes": list(piece),
    }
