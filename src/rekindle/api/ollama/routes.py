"""Serves /api/chat and /api/generate."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from rekindle.api.base.admin import AdminClient
from rekindle.api.base.models import models_of
from rekindle.api.base.request import RequestBuilder, render_chat
from rekindle.api.base.tools import described
from rekindle.api.ollama.models import bare
from rekindle.api.ollama.reply import RESPONSES, ChatReply, GenerateReply, line, stamped
from rekindle.api.ollama.request import Context, generate_request, messages_of
from rekindle.api.ollama.schema import OllamaChatRequest, OllamaGenerateRequest, RequestBase
from rekindle.http.body import JsonRoute, run_off_loop
from rekindle.http.responses import JsonResponse
from rekindle.protocol.requests import Infill

router = APIRouter(route_class=JsonRoute, tags=["ollama"], responses=RESPONSES)


@router.post("/api/chat")
async def chat(body: OllamaChatRequest, request: Request) -> Response:
    """Answer a conversation. State that was computed for an equal prefix, in any dialect, is
    reused."""
    models = models_of(request)
    runtime = models.runtime(bare(body.model, models))
    if not body.messages:
        return _load_status(body, ChatReply.message(), runtime.name)
    messages = await run_off_loop(request, messages_of, body.messages)
    rendered = await render_chat(request, runtime, messages)
    prompt = {**rendered.fields, "tools": described(body.tools)}
    turn = generate_request(body, RequestBuilder.of(request, runtime), prompt)
    reply = ChatReply(request, runtime, turn, body)
    return await reply.respond(stream=body.streams)


@router.post("/api/generate")
async def generate(body: OllamaGenerateRequest, request: Request) -> Response:
    """Answer a prompt. With the `context` of an earlier response, continue that conversation."""
    models = models_of(request)
    runtime = models.runtime(bare(body.model, models))
    if not body.prompt:
        return _load_status(body, GenerateReply.message(), runtime.name)
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


def _load_status(body: RequestBase, empty: dict[str, Any], name: str) -> Response:
    """Answer a request without a prompt, which asks to load or unload the model. Served models
    are always loaded, so there is nothing to do."""
    reason = "unload" if body.unloads else "load"
    fields = stamped(body.model or name, {**empty, "done": True, "done_reason": reason})
    if not body.streams:
        return JsonResponse(fields)
    return Response(line(fields), media_type="application/x-ndjson")
