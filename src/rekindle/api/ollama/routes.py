"""POST /api/chat and POST /api/generate."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from rekindle.api.base.admin import AdminClient
from rekindle.api.base.images import illustrate
from rekindle.api.base.models import models_of
from rekindle.api.base.names import with_affinity
from rekindle.api.base.tools import described
from rekindle.api.ollama.models import runtime_named
from rekindle.api.ollama.reply import RESPONSES, Answer, ChatFormat, GenerateFormat, line, stamped
from rekindle.api.ollama.request import (
    Context,
    conversation,
    generate_request,
    messages_of,
    prompt_messages,
)
from rekindle.api.ollama.schema import OllamaChatRequest, OllamaGenerateRequest, RequestBase
from rekindle.http.auth import caller_of
from rekindle.http.body import JsonRoute, run_off_loop
from rekindle.http.responses import JsonResponse
from rekindle.protocol.events import AssistantMessage

router = APIRouter(route_class=JsonRoute, tags=["ollama"], responses=RESPONSES)


@router.post("/api/chat")
async def chat(body: OllamaChatRequest, request: Request) -> Response:
    """Answer a conversation in Ollama's form; what was computed for an equal prefix before, in any
    form, is reused."""
    models = models_of(request)
    runtime = runtime_named(models, body.model)
    if not body.messages:
        return _there(body, ChatFormat().text(""), runtime.name)
    messages = await run_off_loop(request, messages_of, body.messages)
    illustrated = await illustrate(request, runtime, messages, None)
    prompt = {**conversation(messages, illustrated), "tools": described(body.tools)}
    asked = generate_request(body, models.config, caller_of(request).salt, prompt)
    answer = Answer(
        runtime, with_affinity(request, asked), ChatFormat(), body.model or runtime.name
    )
    return await answer.respond(request, streams=body.streams)


@router.post("/api/generate")
async def generate(body: OllamaGenerateRequest, request: Request) -> Response:
    """Answer a prompt; `context` of an earlier answer makes it go on from there."""
    models = models_of(request)
    runtime = runtime_named(models, body.model)
    if not body.prompt:
        return _there(body, GenerateFormat().text(""), runtime.name)
    client, normalise = AdminClient.of_tenant(request), models.config.normalise
    context = Context(client, runtime, body, normalise=normalise)
    prompt = {"prompt": body.prompt} if body.raw else await context.prompt()
    if not body.raw and not body.context:
        messages = prompt_messages(body)
        prompt = conversation(messages, await illustrate(request, runtime, messages, None))

    async def context_after(reply: AssistantMessage) -> dict[str, Any]:
        return await context.after(reply.text)

    asked = generate_request(body, models.config, caller_of(request).salt, prompt)
    name = body.model or runtime.name
    answer = Answer(runtime, with_affinity(request, asked), GenerateFormat(), name, context_after)
    return await answer.respond(request, streams=body.streams)


def _there(body: RequestBase, empty: dict[str, Any], name: str) -> Response:
    """Without a prompt, clients ask for a model to be loaded or unloaded: those that are served
    are always loaded, and what they keep is kept."""
    reason = "unload" if body.unloads else "load"
    fields = stamped(body.model or name, {**empty, "done": True, "done_reason": reason})
    if not body.streams:
        return JsonResponse(fields)
    return Response(line(fields), media_type="application/x-ndjson")
