"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from rekindle.api.answer import Answer, Choice, finite
from rekindle.api.auth import salt_of
from rekindle.api.defaults import asks
from rekindle.api.json import OrjsonRoute
from rekindle.api.message import rendered
from rekindle.api.schema import ChatRequest
from rekindle.api.service import ModelNumber, Service
from rekindle.config import Config
from rekindle.events import Finished, TokenLog
from rekindle.runtime.wire import Ask

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
        "progress": bool(body.prefill_progress and body.stream),
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

    def opening(self, index: int) -> dict[str, Any] | None:
        return _delta(index, {"role": "assistant", "content": ""})

    def delta(self, index: int, text: str, logs: list[TokenLog] | None) -> dict[str, Any]:
        choice = _delta(index, {"content": text})
        if logs is not None:
            choice["logprobs"] = _logprobs(logs)
        return choice

    def closing(self, index: int, finished: Finished) -> dict[str, Any]:
        return {**_delta(index, _message_id(finished)), "finish_reason": finished.reason}

    def choice(self, index: int, answer: Choice) -> dict[str, Any]:
        assert answer.finished is not None
        return {
            "index": index,
            "message": {
                "role": "assistant",
                "content": answer.text,
                "refusal": None,
                **_message_id(answer.finished),
            },
            "logprobs": _logprobs(answer.logs) if answer.logs else None,
            "finish_reason": answer.finished.reason,
        }


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
