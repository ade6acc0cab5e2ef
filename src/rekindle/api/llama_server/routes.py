"""Serves llama.cpp's own endpoints: /completion, /infill, /slots, /props, /embedding and others."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from rekindle.api.base.completions import build_request, token_limit
from rekindle.api.base.llama_result import sampling_settings
from rekindle.api.base.loading import answer_when_loaded, loaded
from rekindle.api.base.models import ModelNumber, ServedModels, models_of
from rekindle.api.base.reply import VectorsResponse, result_of, vectors
from rekindle.api.base.request import RequestBuilder
from rekindle.api.base.sampling import SamplingFields
from rekindle.api.llama_server.errors import LlamaErrorBody, NotSupported
from rekindle.api.llama_server.reply import NativeReply
from rekindle.api.llama_server.schema import (
    EmbeddingRequest,
    InfillRequest,
    NativeCompletionRequest,
    NativeRequest,
)
from rekindle.config import Config
from rekindle.errors import Forbidden, Unavailable, Unsupported
from rekindle.http.auth import caller_of
from rekindle.http.body import JsonRoute, run_off_loop, run_off_loop_if_large
from rekindle.http.responses import MAY_STREAM, JsonResponse, documented, while_connected
from rekindle.protocol.events import Embedded
from rekindle.protocol.requests import IMAGE, EmbedRequest, GenerateRequest, Infill
from rekindle.version import __version__
from rekindle.worker.client import RuntimeClient

router = APIRouter(
    route_class=JsonRoute, tags=["llama.cpp"], responses=documented(400, model=LlamaErrorBody)
)


@router.post("/completion", responses=MAY_STREAM)
async def complete(
    body: NativeCompletionRequest, request: Request, number: ModelNumber = None
) -> Response:
    """Continue a text, or each of a list of texts."""
    runtime = models_of(request).runtime(body.model, number)

    async def answer() -> Response:
        builder = RequestBuilder.of(request, runtime)
        requests = await run_off_loop(request, _completions, body, builder)
        return await NativeReply(request, runtime, requests, body).respond(stream=bool(body.stream))

    return await answer_when_loaded(request, runtime, answer, stream=bool(body.stream))


@router.post("/infill", responses=MAY_STREAM)
async def infill(body: InfillRequest, request: Request, number: ModelNumber = None) -> Response:
    """Write the text of a gap, for models of code that were trained to fill in the middle."""
    runtime = models_of(request).runtime(body.model, number)

    async def answer() -> Response:
        builder = RequestBuilder.of(request, runtime)
        gap = Infill(prefix=body.input_prefix, suffix=body.input_suffix, extra=body.extra)
        turn = _turn(body, builder, {"prompt": body.prompt, "infill": gap})
        return await NativeReply(request, runtime, [turn], body).respond(stream=bool(body.stream))

    return await answer_when_loaded(request, runtime, answer, stream=bool(body.stream))


def _completions(body: NativeCompletionRequest, builder: RequestBuilder) -> list[GenerateRequest]:
    return [_turn(body, builder, {"prompt": prompt}) for prompt in body.prompts]


def _turn(body: NativeRequest, builder: RequestBuilder, prompt: dict[str, Any]) -> GenerateRequest:
    # One token is sampled in any case. With `n_predict: 0` the client does not get it.
    max_tokens = (
        1 if body.predicts_nothing else token_limit(body.max_tokens, _limit(builder.config))
    )
    fields = {
        **prompt,
        "returns_tokens": bool(body.stream or body.return_tokens),
        "returns_prompt": body.wants_prompt,
        "max_generate_s": body.max_generate_s,
    }
    return build_request(body, builder, max_tokens, body.n_probs or None, fields)


def _limit(config: Config) -> int | None:
    """The default limit of a completion: as in llama.cpp none, unless the operator has set one."""
    return config.completion_max_tokens if "completion_max_tokens" in config.given else None


@router.post("/embedding")
async def embed(body: EmbeddingRequest, request: Request) -> Response:
    """Compute a vector for each text."""
    if body.embd_normalize not in (None, 2):
        raise Unsupported(
            "vectors are always normalised to length 1: send `embd_normalize: 2` or remove it",
            param="embd_normalize",
        )
    models = models_of(request)
    runtime = await loaded(request, models.embedder(body.model))
    wanted = EmbedRequest(
        inputs=body.inputs, reuse=models.config.context_cache, salt=caller_of(request).salt
    )
    embedded = await while_connected(request, result_of(runtime, wanted, Embedded))
    return await run_off_loop_if_large(request, len(embedded.vectors), _vectors, embedded)


def _vectors(embedded: Embedded) -> Response:
    found = [
        {"index": index, "embedding": [vector]} for index, vector in enumerate(vectors(embedded))
    ]
    return VectorsResponse(found)


@router.get("/props")
async def props(request: Request, model: str | None = None, number: ModelNumber = None) -> Response:
    """Describe the model: context, chat template, modalities and the defaults of requests."""
    models = models_of(request)
    runtime = await loaded(request, models.runtime(model, number))
    config, ready = models.config_of(runtime), runtime.loaded
    defaults = SamplingFields.model_validate({})
    body = {
        "default_generation_settings": {
            "n_ctx": ready.context_tokens,
            "params": sampling_settings(defaults.sampling_params(config), config.max_tokens),
        },
        "total_slots": config.parallel,
        "model_alias": runtime.name,
        "model_path": runtime.file_name,
        "modalities": {"vision": IMAGE in ready.modalities, "audio": False},
        "chat_template": ready.chat_template or "",
        "bos_token": ready.bos,
        "eos_token": ready.eos,
        "build_info": f"rekindle-{__version__}",
        "is_sleeping": False,
    }
    return JsonResponse(body)


@router.get("/slots", responses=documented(403, model=LlamaErrorBody))
async def slots(
    request: Request,
    model: str | None = None,
    fail_on_no_slot: int = 0,
    number: ModelNumber = None,
) -> Response:
    """Show how many turns run. A slot is a place in the batch, and belongs to no conversation."""
    if not caller_of(request).admin:
        raise Forbidden("Slots show the load of all tenants, so this endpoint needs an admin key.")
    models = models_of(request)
    runtime = await loaded(request, models.runtime(model, number))
    found = _slots(models, runtime)
    if fail_on_no_slot and all(slot["is_processing"] for slot in found):
        raise Unavailable("no slot available: every place in the batch is taken; try again later")
    return JsonResponse(found)


def _slots(models: ServedModels, runtime: RuntimeClient) -> list[dict[str, Any]]:
    context = runtime.loaded.context_tokens
    return [
        {
            "id": place,
            "n_ctx": context,
            "speculative": False,
            "is_processing": place < runtime.turns,
        }
        for place in range(models.config.parallel)
    ]


@router.post("/slots/{slot}")
async def change_slot(slot: int, request: Request, action: str = "") -> Response:
    """Refuse to save, restore or erase a slot: state belongs to conversations here."""
    raise NotSupported(
        f"This server has no slots to {action[:16] or 'change'}: it keeps the state of every "
        "conversation by itself. GET /v1/cache lists it, GET /v1/cache/{key}/export saves it as a "
        "file, and DELETE /v1/cache/{key} removes it."
    )


@router.get("/lora-adapters")
async def lora_adapters() -> Response:
    """List the adapters whose scale a client may change. There are none."""
    return JsonResponse([])
