"""POST /v1/completions."""

from __future__ import annotations

import codecs
from collections import defaultdict
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from rekindle.api.base.models import ModelNumber, models_of
from rekindle.api.base.names import all_with_affinity
from rekindle.api.base.report import finite
from rekindle.api.openai.reply import Answer, Choice
from rekindle.api.openai.request import completion_requests
from rekindle.api.openai.schema import CompletionRequest
from rekindle.errors import Unsupported
from rekindle.http.auth import caller_of
from rekindle.http.body import JsonRoute, run_off_loop
from rekindle.http.responses import MAY_STREAM
from rekindle.protocol.events import Finished, Part, TextDelta, TokenLogprob

router = APIRouter(route_class=JsonRoute, tags=["completions"])


@router.post("/v1/completions", responses=MAY_STREAM)
async def create_completion(
    body: CompletionRequest, request: Request, number: ModelNumber = None
) -> Response:
    """Continue a text, or each of a list of texts."""
    if body.echo:
        raise Unsupported("echoing the prompt is not supported: remove `echo`", param="echo")
    models = models_of(request)
    runtime = models.runtime(body.model, number)
    salt = caller_of(request).salt
    requests = await run_off_loop(request, completion_requests, body, models.config, salt)
    requests = all_with_affinity(request, requests)
    answer = Answer(runtime, requests, body, CompletionFormat(), others=models.others(runtime))
    return await answer.respond(request)


class CompletionFormat:
    id_prefix = "cmpl"
    whole = "text_completion"
    chunk = "text_completion"

    def __init__(self) -> None:
        self._offsets: dict[int, Offset] = defaultdict(Offset)

    def opening(self, index: int, *, calls: bool) -> dict[str, Any] | None:
        return None

    def delta(self, index: int, part: Part) -> dict[str, Any]:
        assert isinstance(part, TextDelta), "a completion has no other parts"
        return self._choice(index, part.text, part.logprobs, None)

    def closing(self, index: int, finished: Finished) -> dict[str, Any]:
        return self._choice(index, "", None, finished.reason)

    def choice(self, index: int, choice: Choice) -> dict[str, Any]:
        assert choice.finished is not None
        message = choice.message
        return self._choice(index, message.text, message.logprobs, choice.finished.reason)

    def _choice(
        self, index: int, text: str, logprobs: list[TokenLogprob] | None, reason: str | None
    ) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": _logprobs(logprobs, self._offsets[index]) if logprobs else None,
            "finish_reason": reason,
        }


class Offset:
    """Where in the text the next token begins; a character split over tokens counts at its end."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._characters = 0

    def advance(self, piece: bytes) -> int:
        """The offset of this token."""
        start = self._characters
        self._characters += len(self._decoder.decode(piece))
        return start


def _logprobs(logprobs: list[TokenLogprob], offset: Offset) -> dict[str, Any]:
    return {
        "tokens": [_text(token.piece) for token in logprobs],
        "token_logprobs": [finite(token.logprob) for token in logprobs],
        "top_logprobs": [
            {_text(piece): finite(score) for piece, score in token.top} for token in logprobs
        ],
        "text_offset": [offset.advance(token.piece) for token in logprobs],
    }


def _text(piece: bytes) -> str:
    return piece.decode(errors="replace")
