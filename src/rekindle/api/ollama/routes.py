"""Serves /api/chat and /api/generate."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from rekindle.api.base.admin import AdminClient
from rekindle.api.base.loading import Waiting, answer_when_loaded
from rekindle.api.base.models import models_of
from rekindle.api.base.request import RequestBuilder, render_chat
from rekindle.api.base.tools import described
from rekindle.api.ollama.keep_alive import set_keep_alive, unload
from rekindle.api.ollama.models import bare
from rekindle.api.ollama.reply import (
    RESPONSES,
    ChatReply,
    GenerateReply,
    LineStream,
    line,
    stamped,
)
from rekindle.api.ollama.request import Context, generate_request, messages_of
from rekindle.api.ollama.schema import OllamaChatRequest, OllamaGenerateRequest, RequestBase
from rekindle.http.body import JsonRoute, run_off_loop
from rekindle.http.responses import JsonResponse
from rekindle.protocol.requests import Infill
from rekindle.worker.client import RuntimeClient

router = APIRouter(route_class=JsonRoute, tags=["ollama"], responses=RESPONSES)


@router.post("/api/chat")
async def chat(body: OllamaChatRequest, request: Request) -> Response:
    """Answer a conversation. State that was computed for an equal prefix, in any dialect, is
    reused."""
    return await _answer(body, request, ChatReply.message(), has_prompt=bool(body.messages))


async def _chat(body: OllamaChatRequest, request: Request, runtime: RuntimeClient) -> Response:
    messages = await run_off_loop(request, messages_of, body.messages)
    rendered = await render_chat(request, runtime, messages)
    prompt = {**rendered.fields, "tools": described(body.tools)}
    turn = generate_request(body, RequestBuilder.of(request, runtime), prompt)
    reply = ChatReply(request, runtime, turn, body)
    return await reply.respond(stream=body.streams)


@router.post("/api/generate")
async def generate(body: OllamaGenerateRequest, request: Request) -> Response:
    """Answer a prompt. With the `context` of an earlier response, continue that conversation."""
    return await _answer(body, request, GenerateReply.message(), has_prompt=bool(body.prompt))


async def _generate(
    body: OllamaGenerateRequest, request: Request, runtime: RuntimeClient
) -> Response:
    models = models_of(request)
    if body.system is None and not body.raw:
        body = body.model_copy(update={"system": models.system_of(runtime)})
    client, normalise = AdminClient.of_tenant(request), models.config.normalise
    context = Context(client, runtime, body, normalise=normalise)
    if body.suffix:
        prompt: dict[str, Any] = {
            "prompt": "",
            "infill": Infill(prefix=body.prompt, suffix=body.suffix),
        }
    elif body.raw:
        prompt = {"prompt": body.prompt}
    elif body.context:
        prompt = {"prompt": await context.prompt()}
    else:
        prompt = (await render_chat(request, runtime, context.messages)).fields
    turn = generate_request(body, RequestBuilder.of(request, runtime), prompt)
    reply = GenerateReply(request, runtime, turn, body, context)
    return await reply.respond(stream=body.streams)


async def _answer(
    body: OllamaChatRequest | OllamaGenerateRequest,
    request: Request,
    empty: dict[str, Any],
    *,
    has_prompt: bool,
) -> Response:
    """Load the model and answer. A request without a prompt only loads or unloads the model."""
    models = models_of(request)
    runtime = models.runtime(bare(body.model, models))
    name = body.model or runtime.name

    def sign(_name: str, fraction: float) -> bytes:
        return line(stamped(name, {**empty, "done": False, "x_loading": round(fraction, 2)}))

    async def answer() -> Response:
        set_keep_alive(models, runtime, body.keep_alive)
        if not has_prompt:
            return _status(body, name, empty, "load")
        if isinstance(body, OllamaChatRequest):
            return await _chat(body, request, runtime)
        return await _generate(body, request, runtime)

    if body.unloads and not has_prompt:
        await unload(models, runtime)
        return _status(body, name, empty, "unload")
    waiting = Waiting(sign, LineStream)
    return await answer_when_loaded(request, runtime, answer, stream=body.streams, waiting=waiting)


def _status(body: RequestBase, name: str, empty: dict[str, Any], reason: str) -> Response:
    fields = stamped(name, {**empty, "done": True, "done_reason": reason})
    if not body.streams:
        return JsonResponse(fields)
    return Response(line(fields), media_type="application/x-ndjson")
