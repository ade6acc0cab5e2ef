"""Serves /api/version, /api/tags, /api/ps, /api/show and /api/pull: models in Ollama's form."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncGenerator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from blake3 import blake3
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from rekindle.api.base.models import ServedModels, models_of
from rekindle.api.base.specs import Kind, ModelSpec, kind_of
from rekindle.api.ollama.keep_alive import expires_at
from rekindle.api.ollama.reply import RESPONSES, LineStream, OllamaErrorBody, line, utc
from rekindle.api.ollama.schema import SAMPLING_ALIASES, ModelRequest
from rekindle.errors import BadRequest, Forbidden, ModelError, TooManyRequests
from rekindle.http.auth import caller_of
from rekindle.http.body import JsonRoute, run_off_loop
from rekindle.http.responses import JsonResponse, documented
from rekindle.models.gguf import BrokenHeader, summarise_gguf
from rekindle.models.pull import pull
from rekindle.protocol.frames import Ready
from rekindle.protocol.requests import IMAGE
from rekindle.worker.client import RuntimeClient

LATEST = ":latest"  # clients add it to a name without a tag
SUCCESS = {"status": "success"}

log = logging.getLogger("rekindle.api")

router = APIRouter(
    route_class=JsonRoute, tags=["ollama"], responses=documented(400, model=OllamaErrorBody)
)
pull_router = APIRouter(route_class=JsonRoute, tags=["ollama"], responses=RESPONSES)


def bare(model: str | None, models: ServedModels) -> str | None:
    """The name as this server knows it."""
    if model is None or any(runtime.name == model for runtime in models.all):
        return model
    return model.removesuffix(LATEST)


@router.get("/api/version")
async def version() -> Response:
    """Name the version of Ollama whose API this is. Clients require a minimum."""
    return JsonResponse({"version": "0.30.0"})


@router.get("/api/tags")
async def tags(request: Request) -> Response:
    """List the models that this server serves."""
    return JsonResponse({"models": [_model(runtime) for runtime in models_of(request).all]})


@router.get("/api/ps")
async def running(request: Request) -> Response:
    """List the loaded models, and when each will be unloaded if no request comes."""
    models = models_of(request)
    listed = [
        {
            **_model(runtime),
            "size": models.pool.model(runtime).used_bytes or runtime.file.size_bytes,
            "expires_at": expires_at(models, runtime),
            "size_vram": 0,
            "context_length": runtime.ready.context_tokens,
        }
        for runtime in models.all
        if runtime.ready is not None
    ]
    return JsonResponse({"models": listed})


@router.post("/api/show")
async def show(body: ModelRequest, request: Request) -> Response:
    """Describe one model. This does not load it."""
    models = models_of(request)
    runtime = models.any(bare(body.named, models))
    ready = runtime.described
    if ready is None:
        ready = await run_off_loop(request, _from_header, models, runtime)
    architecture = ready.architecture or "unknown"
    spec = models.spec_of(runtime)
    return JsonResponse(
        {
            "modelfile": f"FROM {runtime.name}\n",
            "parameters": "\n".join(_parameters(spec)),
            **({"system": spec.system} if spec and spec.system else {}),
            "template": ready.chat_template or "",
            "details": _details(runtime),
            "model_info": {
                "general.architecture": architecture,
                "general.parameter_count": ready.parameters,
                f"{architecture}.context_length": ready.context_tokens,
                f"{architecture}.embedding_length": ready.dimensions or None,
            },
            "capabilities": _capabilities(ready),
            "modified_at": utc(datetime.fromtimestamp(runtime.file.modified_s, UTC)),
        }
    )


def _parameters(spec: ModelSpec | None) -> list[str]:
    found = dict(spec.parameters) if spec else {}
    if spec and spec.max_model_len:
        found["num_ctx"] = spec.max_model_len
    names = {**SAMPLING_ALIASES, "max_tokens": "num_predict"}
    return [f"{names.get(name, name)} {value}" for name, value in found.items()]


def _from_header(models: ServedModels, runtime: RuntimeClient) -> Ready:
    """Describe a model that was never loaded by the header of its file."""
    try:
        summary = summarise_gguf(runtime.path) if runtime.path.is_file() else None
    except (OSError, BrokenHeader):
        summary = None
    fields = summary.fields if summary else {}
    architecture = str(fields.get("general.architecture", ""))
    context = fields.get(f"{architecture}.context_length", 0)
    width = fields.get(f"{architecture}.embedding_length", 0)
    template = fields.get("tokenizer.chat_template")
    return Ready(
        context_tokens=context if isinstance(context, int) else 0,
        pool_tokens=0,
        architecture=architecture,
        parameters=summary.parameters if summary else 0,
        chat_template=str(template) if template else None,
        dimensions=width if isinstance(width, int) and models.is_embedder(runtime) else 0,
    )


def _model(runtime: RuntimeClient) -> dict[str, Any]:
    file = runtime.file
    tagged = runtime.name if ":" in runtime.name else f"{runtime.name}{LATEST}"
    identity = f"{runtime.name} {file.size_bytes} {file.modified_s}"
    return {
        "name": tagged,
        "model": tagged,
        "modified_at": utc(datetime.fromtimestamp(file.modified_s, UTC)),
        "size": file.size_bytes,
        "digest": blake3(identity.encode()).hexdigest(),  # changes with the file
        "details": _details(runtime),
    }


def _details(runtime: RuntimeClient) -> dict[str, Any]:
    ready = runtime.described
    family = ready.architecture if ready else ""
    return {
        "parent_model": "",
        "format": runtime.file.format,
        "family": family,
        "families": [family],
        "parameter_size": _size(ready.parameters) if ready else "",
        "quantization_level": ready.quantization if ready else "",
    }


def _capabilities(ready: Ready) -> list[str]:
    if ready.dimensions:
        return ["embedding"]
    optional = {
        # A template without tools gets them in the system prompt.
        "tools": ready.chat_template is not None,
        "vision": IMAGE in ready.modalities,
        "thinking": ready.has_reasoning,
    }
    return ["completion", *(name for name, is_able in optional.items() if is_able)]


def _size(parameters: int) -> str:
    for unit, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if parameters >= unit:
            return f"{parameters / unit:.1f}{letter}"
    return str(parameters)


def check_admin(request: Request, what: str) -> None:
    if not caller_of(request).admin:
        raise Forbidden(f"{what} changes this machine's disk, so it needs an admin key")


class Download:
    """Pulls a model in a thread, for which a stopping server does not wait, and queues lines about
    its progress. Only one runs at a time, because they would share the network and the disk."""

    _busy = threading.Lock()

    def __init__(self, name: str, folder: Path) -> None:
        if not self._busy.acquire(blocking=False):
            raise TooManyRequests("another model is being pulled: try again when it is done")
        self.lines: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()  # None ends them
        self.error: str | None = None
        self.kind: Kind = "text"  # known when the model is here
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._fetch, args=(name, folder), name="pull", daemon=True).start()

    def _fetch(self, name: str, folder: Path) -> None:
        try:
            path = pull(name, models_dir=folder, progress=self)
            self.kind = kind_of(str(path))
        except ModelError as error:
            self.error = str(error)
        except Exception:
            log.exception("pulling %s failed", name)
            self.error = f"pulling {name} failed; the server's log has the details"
        finally:
            self._busy.release()
            self._put(None)

    def say(self, line: str) -> None:
        self._put({"status": line})

    def start(self, total_bytes: int | None, description: str) -> None:
        self._fields: dict[str, Any] = {
            "status": description,
            "digest": description,
            "total": total_bytes or 0,
        }
        self._done_bytes, self._sent_percent = 0, -1
        self._send()

    def advance(self, size_bytes: int) -> None:
        self._done_bytes += size_bytes
        self._send()

    def done(self) -> None:
        pass

    def _send(self) -> None:
        """Send one line per percent: a large file arrives in a million pieces."""
        percent = 100 * self._done_bytes // (self._fields["total"] or 1)
        if percent > self._sent_percent:
            self._sent_percent = percent
            self._put({**self._fields, "completed": self._done_bytes})

    def _put(self, fields: dict[str, Any] | None) -> None:
        with contextlib.suppress(RuntimeError):  # the server has stopped
            self._loop.call_soon_threadsafe(self.lines.put_nowait, fields)


@pull_router.post("/api/pull")
async def pull_model(body: ModelRequest, request: Request) -> Response:
    """Download a model by its name in the catalogue or on the hub. A server with `models` or
    `--models-dir` then offers it. Another one has to be restarted with `--model NAME`."""
    models = models_of(request)
    name = bare(body.named, models)
    if not name:
        raise BadRequest("`model` is missing: send the name of the model to pull.", param="model")
    if any(runtime.name == name for runtime in models.all):
        lines = [{"status": "pulling manifest"}, SUCCESS]
        content = b"".join(map(line, lines)) if body.stream is not False else line(SUCCESS)
        return Response(content, media_type=LineStream.media_type)
    check_admin(request, "pulling a model")
    if body.stream is not False:
        return LineStream(_pulling(name, models), lambda: None)
    async for _ in _pulling(name, models):
        pass
    return JsonResponse(SUCCESS)


async def _pulling(name: str, models: ServedModels) -> AsyncGenerator[bytes, None]:
    """Send lines until the model is here. The download continues if the client disconnects."""
    yield line({"status": "pulling manifest"})
    download = Download(name.removesuffix(LATEST), models.config.models_dir)
    while (fields := await download.lines.get()) is not None:
        yield line(fields)
    if download.error is not None:
        raise BadRequest(download.error, param="model")
    if models.config.loads_on_demand:
        source = name.removesuffix(LATEST)
        models.add(ModelSpec(name=source, source=source, kind=download.kind))
    else:
        yield line({"status": f"start the server with --model {name} to serve it"})
    yield line(SUCCESS)
