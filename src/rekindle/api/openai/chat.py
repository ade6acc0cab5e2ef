"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from rekindle.api.openai import tool_choice
from rekindle.api.openai.answer import Answer, finite
from rekindle.api.openai.choice import Call, Choice, Said
from rekindle.api.openai.defaults import asks
from rekindle.api.openai.message import rendered
from rekindle.api.openai.schema import ChatRequest
from rekindle.api.openai.tool import described
from rekindle.config import Config
from rekindle.protocol.events import CallArguments, CallBegun, Finished, Reasoning, Text, TokenLog
from rekindle.protocol.wire import Ask
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


def chat_asks(body: ChatRequest, config: Config, salt: bytes) -> list[Ask]:
    """The turns that a conversation's request asks for, one for each choice."""
    conversation = {
        "messages": rendered(body.messages),
        "template_kwargs": _template_kwargs(body),
        "tools": described(tool_choice.offered(body.tool_choice, body.tools)),
        "tool_use": tool_choice.tool_use(
            body.tool_choice, parallel=body.parallel_tool_calls is not False
        ),
        "structure": body.response_format.structure if body.response_format else None,
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

    def delta(self, index: int, said: Said) -> dict[str, Any]:
        choice = _delta(index, _piece(said))
        if isinstance(said, Text) and said.logs is not None:
            choice["logprobs"] = _logprobs(said.logs)
        return choice

    def closing(self, index: int, finished: Finished) -> dict[str, Any]:
        return {**_delta(index, _message_id(finished)), "finish_reason": finished.reason}

    def choice(self, index: int, answer: Choice) -> dict[str, Any]:
        assert answer.finished is not None
        return {
            "index": index,
            "message": {
                "role": "assistant",
                "content": answer.text or (None if answer.calls else ""),
                "refusal": None,
                **_reasoning(answer),
                **_tool_calls(answer),
                **_message_id(answer.finished),
            },
            "logprobs": _logprobs(answer.logs) if answer.logs else None,
            "finish_reason": answer.finished.reason,
        }


def _piece(said: Said) -> dict[str, Any]:
    """What one piece of a reply adds to it."""
    match said:
        case Text():
            return {"content": said.text}
        case Reasoning():
            return {"reasoning_content": said.text}
        case CallBegun():
            return {"tool_calls": [{"index": said.index, **_call(Call(said.id, said.name))}]}
        case CallArguments():
            return {"tool_calls": [{"index": said.index, "function": {"arguments": said.text}}]}


def _call(call: Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _reasoning(answer: Choice) -> dict[str, str]:
    return {"reasoning_content": answer.reasoning} if answer.thoughts else {}


def _tool_calls(answer: Choice) -> dict[str, Any]:
    return {"tool_calls": [_call(call) for call in answer.calls]} if answer.calls else {}


def _message_id(finished: Finished) -> dict[str, str]:
    return {} if finished.message_id is None else {"message_id": finished.message_id}


def _delta(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _logprobs(logs: list[TokenLog]) -> dict[str, Any]:
    return {
        "content": [
            {
                **_token(log.piece, log.logprob),
                "top_logprobs": [_token(piece, logprob) for piece, logprob in log.top],
            }
            for log in logs
        ],
        "refusal": None,
    }


def _token(piece: bytes, logprob: float) -> dict[str, Any]:
    return {
        "token": piece.decode(errors="replace"),
        "logprob": finite(logprob),
        "bytes": list(piece),
    }
