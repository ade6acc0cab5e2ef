"""POST /v1/completions."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from rekindle.api.answer import Answer, Choice
from rekindle.api.auth import salt_of
from rekindle.api.defaults import asks
from rekindle.api.json import OrjsonRoute
from rekindle.api.schema import CompletionRequest
from rekindle.api.service import Service
from rekindle.errors import Unsupported
from rekindle.events import TokenLog

router = APIRouter(route_class=OrjsonRoute, tags=["completions"])


@router.post("/v1/completions")
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Continue a text, or each of a list of texts."""
    if body.echo:
        raise Unsupported("echoing the prompt is not supported: remove `echo`", param="echo")
    service: Service = request.state.service
    runtime = service.runtime(body.model)
    turns = asks(
        body,
        service.config,
        salt_of(request),
        [{"prompt": prompt} for prompt in body.prompts],
        max_tokens=body.max_tokens,
        top_logprobs=body.logprobs,
    )
    return await Answer(runtime, turns, body, CompletionShape()).respond(request)


class CompletionShape:
    id_prefix = "cmpl"
    whole = "text_completion"
    chunk = "text_completion"

    def opening(self, index: int) -> dict[str, Any] | None:
        return None

    def delta(self, index: int, text: str, logs: list[TokenLog] | None) -> dict[str, Any]:
        return _choice(index, text, logs, None)

    def closing(self, index: int, reason: str) -> dict[str, Any]:
        return _choice(index, "", None, reason)

    def choice(self, index: int, answer: Choice) -> dict[str, Any]:
        assert answer.finished is not None
        return _choice(index, answer.text, answer.logs or None, answer.finished.reason)


def _choice(
    index: int, text: str, logs: list[TokenLog] | None, reason: str | None
) -> dict[str, Any]:
    return {
        "index": index,
        "text": text,
        "logprobs": _logprobs(logs) if logs else None,
        "finish_reason": reason,
    }


def _logprobs(logs: list[TokenLog]) -> dict[str, Any]:
    pieces = [_text(log.piece) for log in logs]
    offsets = [0]
    for piece in pieces:
        offsets.append(offsets[-1] + len(piece))
    return {
        "tokens": pieces,
        "token_logprobs": [log.logprob for log in logs],
        "top_logprobs": [{_text(piece): score for piece, score in log.top} for log in logs],
        "text_offset": offsets[:-1],
    }


def _text(piece: bytes) -> str:
    return piece.decode(errors="replace")
