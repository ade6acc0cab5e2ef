"""Serves /api/create, /api/copy and /api/delete: models that requests add and remove."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from fastapi import APIRouter
from pydantic import Field, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from rekindle.api.base.fields import StrictModel, Text, explain
from rekindle.api.base.known_fields import FieldTable, Ignored, KnownFields, Refused
from rekindle.api.base.models import ServedModels, models_of
from rekindle.api.base.specs import ModelSpec, created_spec
from rekindle.api.ollama.models import LATEST, SUCCESS, bare, check_admin
from rekindle.api.ollama.reply import RESPONSES, LineStream, OllamaErrorBody, line
from rekindle.api.ollama.schema import SAMPLING_ALIASES, ModelRequest
from rekindle.config.presets import ModelParameters
from rekindle.errors import BadRequest, ModelError, ModelNotFound, Unsupported
from rekindle.http.body import JsonRoute, run_off_loop
from rekindle.http.responses import JsonResponse, documented
from rekindle.models.catalogue import CATALOGUE, HubModel, locate
from rekindle.models.created import remove_created, write_created
from rekindle.models.local import find_pulled_model
from rekindle.models.local import remove as remove_files
from rekindle.models.pull import pull

CREATE = "only a local model can be the source: name it in `from` and remove"
FIELD_TABLE: FieldTable = {
    "template": Refused("the model's own chat template is always used: remove", ("",)),
    "files": Refused(f"files are not uploaded: {CREATE}", ({},)),
    "adapters": Refused("list adapters under `models` in rekindle.yaml and remove", ({}, [])),
    "messages": Refused("a created model begins with a system prompt only: remove", ([],)),
    "quantize": Refused("use `rekindle convert --quant` and remove", ("",)),
    "modelfile": Refused("send `from`, `system` and `parameters` instead of", ("",)),
    "license": Ignored("licences stay with the files"),
}
#: The settings that Ollama's parameters stand for.
PARAMETERS = {
    "num_predict": "max_tokens",
    "num_ctx": "max_model_len",
    **{theirs: ours for ours, theirs in SAMPLING_ALIASES.items()},
}
NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)*(:\w[\w.-]*)?")

router = APIRouter(
    route_class=JsonRoute, tags=["ollama"], responses=documented(400, 403, model=OllamaErrorBody)
)


class CreateRequest(KnownFields, ModelRequest):
    field_table: ClassVar[FieldTable] = FIELD_TABLE

    source: Text | None = Field(None, alias="from", description="A model on this machine")
    system: Text | None = None
    parameters: dict[str, Any] | None = None


class CopyRequest(StrictModel):
    source: str
    destination: str


class _Progress:
    """A pull that finds its files on this machine says nothing."""

    def say(self, line: str) -> None: ...
    def start(self, total_bytes: int | None, description: str) -> None: ...
    def advance(self, size_bytes: int) -> None: ...
    def done(self) -> None: ...


@router.post("/api/create", responses=RESPONSES)
async def create_model(body: CreateRequest, request: Request) -> Response:
    """Create a model from one on this machine, with a system prompt and parameters. With API keys,
    this needs an admin key."""
    check_admin(request, "creating a model")
    if not body.source:
        raise BadRequest(
            "`from` is missing: send the name of a model, or the path of a file or folder.",
            param="from",
        )
    models, name = models_of(request), _new_name(body.named)
    record = await run_off_loop(request, _record, models, body.source, body)
    await _store(models, name, record)
    lines = [{"status": "using existing layer"}, {"status": "writing manifest"}, SUCCESS]
    if body.stream is False:
        return JsonResponse(SUCCESS)
    return LineStream(_lines(lines), lambda: None)


async def _lines(lines: list[dict[str, Any]]) -> AsyncGenerator[bytes, None]:
    for each in lines:
        yield line(each)


@router.post("/api/copy")
async def copy_model(body: CopyRequest, request: Request) -> Response:
    """Offer a model under a second name. With API keys, this needs an admin key."""
    check_admin(request, "copying a model")
    models, name = models_of(request), _new_name(body.destination)
    await _store(models, name, _inherited(_spec(models, body.source)))
    return JsonResponse(SUCCESS)


@router.delete("/api/delete")
async def delete_model(body: ModelRequest, request: Request) -> Response:
    """Delete a created or pulled model. With API keys, this needs an admin key."""
    check_admin(request, "deleting a model")
    models = models_of(request)
    if not body.named:
        raise BadRequest("`model` is missing: send the name of the model to delete.", param="model")
    spec = _spec(models, body.named)
    folder = models.config.models_dir
    if spec.is_created:
        await models.remove(spec.name)
        remove_created(folder, spec.name)
        return JsonResponse(SUCCESS)
    if not models.is_removable(spec):
        raise BadRequest(
            f"The model {spec.name} is in the server's settings: remove it there.", param="model"
        )
    path = next(each.path for each in models.all if each.name == spec.name)
    if users := [each.name for each in models.all if each.path == path and each.name != spec.name]:
        raise BadRequest(
            f"The models {', '.join(users)[:256]} use the same file: delete them first.",
            param="model",
        )
    try:
        pulled = await run_off_loop(request, find_pulled_model, spec.name, folder)
    except ModelError as error:
        raise BadRequest(str(error), param="model") from None
    await models.remove(spec.name)
    await run_off_loop(request, remove_files, pulled, folder)
    return JsonResponse(SUCCESS)


def _spec(models: ServedModels, name: str) -> ModelSpec:
    found = bare(name, models)
    runtime = next((each for each in models.all if each.name == found), None)
    spec = models.spec_of(runtime) if runtime else None
    if spec is None:
        raise ModelNotFound(f"There is no model {name[:128]!r}; GET /api/tags lists them.")
    return spec


def _new_name(name: str | None) -> str:
    name = (name or "").removesuffix(LATEST)
    if len(name) > 128 or not NAME.fullmatch(name):
        raise BadRequest(
            "A model's name has letters, digits and . _ - and may end with :TAG.", param="model"
        )
    return name


def _record(models: ServedModels, source: str, body: CreateRequest) -> dict[str, Any]:
    """Describe the new model. Raises BadRequest if its source is not on this machine."""
    known = bare(source, models)
    served = next((each for each in models.all if each.name == known), None)
    spec = models.spec_of(served) if served else None
    record: dict[str, Any] = _inherited(spec) if spec else {"from": _found(models, source)}
    if body.system is not None:
        record["system"] = body.system or None
    context, parameters = _parameters(body.parameters or {})
    record["parameters"] = {**record.get("parameters", {}), **parameters}
    if context is not None:
        record["max_model_len"] = context
    return {field: value for field, value in record.items() if value is not None}


def _inherited(spec: ModelSpec) -> dict[str, Any]:
    path = Path(spec.source).expanduser()
    record = {
        "from": str(path.resolve()) if path.exists() else spec.source,
        "adapter": str(spec.adapter) if spec.adapter else None,
        "system": spec.system,
        "parameters": dict(spec.parameters),
        "max_model_len": spec.max_model_len,
    }
    return {field: value for field, value in record.items() if value is not None}


def _found(models: ServedModels, source: str) -> str:
    """Return a source that is on this machine and whole."""
    folder = models.config.models_dir
    try:
        place = locate(source, folder)
        if isinstance(place, HubModel):
            return str(find_pulled_model(source, folder).path)
        path = pull(source, models_dir=folder, progress=_Progress())
    except ModelError as error:
        raise BadRequest(str(error), param="from") from None
    return source if source in CATALOGUE else str(path.resolve())


def _parameters(sent: Mapping[str, Any]) -> tuple[int | None, dict[str, Any]]:
    """Translate Ollama's parameters. Returns the context length and the defaults of requests."""
    named = {PARAMETERS.get(name, name): value for name, value in sent.items()}
    context = named.pop("max_model_len", None)
    if context is not None and not (isinstance(context, int) and 16 <= context <= 10_000_000):
        raise BadRequest("`num_ctx` takes a number of tokens from 16.", param="parameters")
    if named.get("max_tokens") in (-1, -2, 0):
        del named["max_tokens"]
    known = (*ModelParameters.model_fields, "max_model_len")
    if unknown := [name for name in sent if PARAMETERS.get(name, name) not in known]:
        raise Unsupported(
            f"`parameters` of a model cannot have {', '.join(unknown)[:128]}: send them as "
            "`options` of each request.",
            param="parameters",
        )
    try:
        defaults = ModelParameters.model_validate(named)
    except ValidationError as error:
        raise explain(error.errors()) from None
    return context, defaults.model_dump(exclude_none=True)


async def _store(models: ServedModels, name: str, record: dict[str, Any]) -> None:
    """Offer the model, and keep its record for the next start."""
    existing = next((each for each in models.all if each.name == name), None)
    spec = models.spec_of(existing) if existing else None
    if existing is not None and not (spec and spec.is_created):
        raise BadRequest(
            f"The name {name} is taken by a model of the server's settings: choose another one.",
            param="model",
        )
    models.check_on_demand()
    if existing is not None:
        await models.remove(name)
    try:
        write_created(models.config.models_dir, name, record)
    except ModelError as error:
        raise BadRequest(str(error)) from None
    models.add(created_spec(name, record))
