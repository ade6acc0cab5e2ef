"""Serves /v1/internal/model/* and /management/processes: which models are loaded."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel, Field
from starlette.requests import Request

from rekindle.api.base.fields import StrictModel
from rekindle.api.base.loading import loaded
from rekindle.api.base.models import ServedModels, models_of
from rekindle.errors import BadRequest, Forbidden
from rekindle.http.auth import caller_of
from rekindle.http.body import JsonRoute
from rekindle.http.responses import documented
from rekindle.worker.client import RuntimeClient
from rekindle.worker.usage import usage_of

router = APIRouter(route_class=JsonRoute, tags=["models"], responses=documented(400, 403, 404))

Status = Literal["loaded", "loading", "unloaded", "failed"]


class ModelName(StrictModel):
    model: str | None = Field(None, description="The name of the model")
    model_name: str | None = Field(None, description="Alias of `model`")

    @property
    def named(self) -> str:
        name = self.model or self.model_name
        if not name:
            raise BadRequest("`model` is missing: send the name of a model.", param="model")
        return name


class ModelState(BaseModel):
    """One model. `number` is for `X-Model-Id`; models that generate no text have none."""

    name: str
    number: int | None = None
    kind: Literal["text", "embedding"]
    status: Status
    loading: float | None = None  # progress from 0 to 1, while it is loaded
    error: str | None = None  # why the last load failed
    keep_loaded: bool
    idle_unload: float | None = None  # seconds without a request until it is unloaded
    idle: float | None = None  # seconds since the last request, of a loaded model
    size_bytes: int  # of its file or folder
    memory_bytes: int  # estimated or measured, whichever is larger; 0 if it is not loaded
    context_tokens: int | None = None  # known once it was loaded


class ModelStates(BaseModel):
    models: list[ModelState]
    model_names: list[str]
    memory_bytes: int  # of all models
    max_memory: int | None = None


class ProcessState(BaseModel):
    """The process of a loaded model."""

    model: str
    status: Status
    pid: int
    cpu_seconds: float  # since the process started
    resident_bytes: int
    turns: int  # waiting and running
    waiting: int  # requests that wait until it is loaded
    idle: float | None  # seconds since the last request; None: it is busy
    restarts: int


class ProcessStates(BaseModel):
    processes: list[ProcessState]


@router.get("/v1/internal/model/list", response_model_exclude_none=True)
async def list_states(request: Request) -> ModelStates:
    """List all models with their status, in the order of their numbers."""
    models = models_of(request)
    return ModelStates(
        models=[_state(models, runtime) for runtime in models.all],
        model_names=[runtime.name for runtime in models.all],
        memory_bytes=models.pool.used_bytes,
        max_memory=models.pool.max_bytes,
    )


@router.get("/v1/internal/model/info/{model:path}", response_model_exclude_none=True)
async def show_state(model: str, request: Request) -> ModelState:
    """Show one model. This does not load it."""
    models = models_of(request)
    return _state(models, models.any(model))


@router.post("/v1/internal/model/load", response_model_exclude_none=True)
async def load_model(body: ModelName, request: Request) -> ModelState:
    """Load a model, and answer when it is loaded. With API keys, this needs an admin key."""
    _check_admin(request)
    models = models_of(request)
    runtime = await loaded(request, models.any(body.named))
    return _state(models, runtime)


@router.post(
    "/v1/internal/model/unload", response_model_exclude_none=True, responses=documented(409)
)
async def unload_model(body: ModelName, request: Request) -> ModelState:
    """Unload a model, or cancel its load. The next request for it loads it again. With API keys,
    this needs an admin key."""
    _check_admin(request)
    models = models_of(request)
    runtime = models.any(body.named)
    await models.pool.unload(runtime)
    return _state(models, runtime)


@router.get("/management/processes", responses=documented(403))
async def list_processes(request: Request) -> ProcessStates:
    """Show what the process of each model uses. With API keys, this needs an admin key."""
    _check_admin(request)
    models = models_of(request)
    found = (_process(models, runtime) for runtime in models.all)
    return ProcessStates(processes=[each for each in found if each is not None])


def _check_admin(request: Request) -> None:
    if not caller_of(request).admin:
        raise Forbidden("Models are shared by all tenants, so this endpoint needs an admin key.")


def _state(models: ServedModels, runtime: RuntimeClient) -> ModelState:
    model = models.pool.model(runtime)
    described = runtime.described
    fields: dict[str, Any] = {}
    if model.status == "loading":
        fields["loading"] = round(model.fraction, 3)
    if model.status == "failed":
        fields["error"] = model.failure
    return ModelState(
        name=runtime.name,
        number=models.number_of(runtime),
        kind="embedding" if models.is_embedder(runtime) else "text",
        status=model.status,
        keep_loaded=model.policy.keep_loaded,
        idle_unload=model.idle_limit_s,
        idle=_idle_s(models, runtime) if model.is_loaded else None,
        size_bytes=runtime.file.size_bytes,
        memory_bytes=model.used_bytes,
        context_tokens=described.context_tokens if described else None,
        **fields,
    )


def _process(models: ServedModels, runtime: RuntimeClient) -> ProcessState | None:
    pid = runtime.supervisor.pid
    if pid is None:
        return None
    usage, model = usage_of(pid), models.pool.model(runtime)
    return ProcessState(
        model=runtime.name,
        status=model.status,
        pid=pid,
        cpu_seconds=round(usage.cpu_s, 2),
        resident_bytes=usage.resident_bytes,
        turns=runtime.turns,
        waiting=model.waiters,
        idle=_idle_s(models, runtime),
        restarts=runtime.supervisor.restarts,
    )


def _idle_s(models: ServedModels, runtime: RuntimeClient) -> float | None:
    model = models.pool.model(runtime)
    if not model.is_idle:
        return None
    return round(max(models.pool.clock() - model.last_used_s, 0.0), 1)
