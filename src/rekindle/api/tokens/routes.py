"""POST /v1/tokenize, /v1/detokenize, /v1/apply-template and /v1/internal/token-count."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from rekindle.api.tokens.schema import (
    DetokenizeRequest,
    TemplateRequest,
    TokenCountBody,
    TokenCountRequest,
    TokenizeRequest,
)
from rekindle.protocol.tokenisation import Detokenize, Detokenized, Tokenize, Tokenized
from rekindle.server.admin_client import AdminClient
from rekindle.server.json_route import JsonRoute, beside_loop
from rekindle.server.models import ModelNumber, models_of
from rekindle.server.responses import JsonResponse

router = APIRouter(route_class=JsonRoute, tags=["tokens"])


@router.post("/v1/tokenize")
async def tokenize(body: TokenizeRequest, request: Request, number: ModelNumber = None) -> Response:
    """The tokens of a text, or of a conversation as the model would read it."""
    models = models_of(request)
    asked = await beside_loop(request, body.asked, normalise=models.config.normalise)
    runtime = models.any(body.model, number)
    found = await AdminClient.of_tenant(request).request(runtime, asked, Tokenized)
    return await beside_loop(request, _answer, found, body)


@router.post("/v1/detokenize")
async def detokenize(
    body: DetokenizeRequest, request: Request, number: ModelNumber = None
) -> Response:
    """The text of tokens, control tokens included."""
    runtime = models_of(request).any(body.model, number)
    asked = Detokenize(body.tokens)
    found = await AdminClient.of_tenant(request).request(runtime, asked, Detokenized)
    return JsonResponse({"content": found.text, "prompt": found.text})


@router.post("/v1/apply-template")
async def apply_template(
    body: TemplateRequest, request: Request, number: ModelNumber = None
) -> Response:
    """A conversation as the text that the model would read."""
    models = models_of(request)
    asked = await beside_loop(request, body.asked, normalise=models.config.normalise)
    runtime = models.runtime(body.model, number)
    client = AdminClient.of_tenant(request)
    tokens = (await client.request(runtime, asked, Tokenized)).tokens
    found = await client.request(runtime, Detokenize(tokens), Detokenized)
    return JsonResponse({"prompt": found.text})


@router.post("/v1/internal/token-count")
async def count_tokens(
    body: TokenCountRequest, request: Request, number: ModelNumber = None
) -> TokenCountBody:
    """How many tokens a text has, with what the model wants around it."""
    runtime = models_of(request).any(body.model, number)
    asked = Tokenize(text=body.text, add_special=True, with_tokens=False)
    found = await AdminClient.of_tenant(request).request(runtime, asked, Tokenized)
    return TokenCountBody(length=found.count)


def _answer(found: Tokenized, body: TokenizeRequest) -> Response:
    tokens: list[Any] = found.tokens
    if body.with_pieces:
        pairs = zip(found.tokens, found.pieces, strict=True)
        tokens = [{"id": token, "piece": _piece(piece)} for token, piece in pairs]
    answer: dict[str, Any] = {
        "tokens": tokens,
        "count": found.count,
        "max_model_len": found.context_tokens,
    }
    if body.return_token_strs:
        answer["token_strs"] = [piece.decode(errors="replace") for piece in found.pieces]
    return JsonResponse(answer)


def _piece(piece: bytes) -> str | list[int]:
    """Text; bytes where a character goes on in the next token."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)
