"""GET /api/version, /api/tags and /api/ps, POST /api/show: which models there are."""

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
from rekindle.api.ollama.reply import RESPONSES, LineStream, OllamaErrorBody, line
from rekindle.api.ollama.schema import ModelRequest
from rekindle.errors import BadRequest, Forbidden, ModelError, TooManyRequests
from rekindle.http.auth import caller_of
from rekindle.http.body import JsonRoute
from rekindle.http.responses import JsonResponse, documented
from rekindle.models.pull import pull
from rekindle.protocol.frames import Ready
from rekindle.protocol.media import IMAGE
from rekindle.worker.client import RuntimeClient

# ----------------------------------------------------------------------
# The names that Ollama's clients give to models.

LATEST = ":latest"  # what clients add to a name without a tag


def bare(model: str | None, models: ServedModels) -> str | None:
    """The name as this server knows it."""
    if model is None or any(runtime.name == model for runtime in models.all):
        return model
    return model.removesuffix(LATEST)


def runtime_named(models: ServedModels, model: str | None) -> RuntimeClient:
    """The chat model of this name; raises ModelNotFound."""
    return models.runtime(bare(model, models))


VERSION = "0.30.0"  # of Ollama, whose API this is: clients ask for a least one
NEVER = "9999-12-31T23:59:59Z"  # when a model is unloaded
UNITS = ((10**9, "B"), (10**6, "M"), (10**3, "K"))

router = APIRouter(
    route_class=JsonRoute, tags=["ollama"], responses=documented(400, model=OllamaErrorBody)
)


@router.get("/api/version")
async def version() -> Response:
    """The version of Ollama whose API this is."""
    return JsonResponse({"version": VERSION})


@router.get("/api/tags")
async def tags(request: Request) -> Response:
    """The models this server answers with."""
    return JsonResponse({"models": [_model(runtime) for runtime in models_of(request).all]})


@router.get("/api/ps")
async def running(request: Request) -> Response:
    """The same: all of them are loaded, and stay so."""
    models = [
        {
            **_model(runtime),
            "expires_at": NEVER,
            "size_vram": 0,
            "context_length": runtime.ready.context_tokens,
        }
        for runtime in models_of(request).all
        if runtime.ready is not None
    ]
    return JsonResponse({"models": models})


@router.post("/api/show")
async def show(body: ModelRequest, request: Request) -> Response:
    """What one of them is like."""
    models = models_of(request)
    runtime = models.any(bare(body.named, models))
    ready = runtime.loaded
    architecture = ready.architecture or "unknown"
    return JsonResponse(
        {
            "modelfile": f"FROM {runtime.name}\n",
            "parameters": "",
            "template": ready.chat_template or "",
            "details": _details(runtime),
            "model_info": {
                "general.architecture": architecture,
                "general.parameter_count": ready.parameters,
                f"{architecture}.context_length": ready.context_tokens,
                f"{architecture}.embedding_length": ready.dimensions or None,
            },
            "capabilities": _capabilities(ready),
            "modified_at": _time(runtime.file.modified_s),
        }
    )


def _model(runtime: RuntimeClient) -> dict[str, Any]:
    file = runtime.file
    tagged = runtime.name if ":" in runtime.name else f"{runtime.name}{LATEST}"
    identity = f"{runtime.name} {file.size_bytes} {file.modified_s}"
    return {
        "name": tagged,
        "model": tagged,
        "modified_at": _time(file.modified_s),
        "size": file.size_bytes,
        "digest": blake3(identity.encode()).hexdigest(),  # changes with the file
        "details": _details(runtime),
    }


def _details(runtime: RuntimeClient) -> dict[str, Any]:
    ready = runtime.ready
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
    able = ["completion"]
    if ready.chat_template is not None:
        able.append("tools")  # they are asked for in words where the template has no place for them
    if IMAGE in ready.modalities:
        able.append("vision")
    if ready.has_reasoning:
        able.append("thinking")
    return able


def _size(parameters: int) -> str:
    for unit, letter in UNITS:
        if parameters >= unit:
            return f"{parameters / unit:.1f}{letter}"
    return str(parameters)


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


# ----------------------------------------------------------------------
# POST /api/pull: a model is fetched to this machine, with lines of progress.

log = logging.getLogger("rekindle.api")

SUCCESS = {"status": "success"}

pull_router = APIRouter(route_class=JsonRoute, tags=["ollama"], responses=RESPONSES)


class QueueProgress:
    """Progress of a download that runs in a thread, as lines for the event loop to send."""

    def __init__(self) -> None:
        self.lines: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()  # None: no more
        self._loop = asyncio.get_running_loop()
        self._fields: dict[str, Any] = {}
        self._done_bytes = 0
        self._sent_percent = -1

    def start(self, total_bytes: int | None, description: str) -> None:
        self._fields = {"status": description, "digest": description, "total": total_bytes or 0}
        self._done_bytes, self._sent_percent = 0, -1
        self._send()

    def advance(self, size_bytes: int) -> None:
        self._done_bytes += size_bytes
        self._send()

    def done(self) -> None:
        pass

    def _send(self) -> None:
        """A line for each percent: a large file comes in a million pieces."""
        percent = 100 * self._done_bytes // (self._fields["total"] or 1)
        if percent > self._sent_percent:
            self._sent_percent = percent
            self._put({**self._fields, "completed": self._done_bytes})

    def _put(self, fields: dict[str, Any] | None) -> None:
        with contextlib.suppress(RuntimeError):  # the server has stopped meanwhile
            self._loop.call_soon_threadsafe(self.lines.put_nowait, fields)

    def end(self) -> None:
        self._put(None)


class Download:
    """A model that is being pulled, by a thread that a stopping server does not wait for. One at a
    time: they would share the same line and the same disk."""

    _busy = threading.Lock()

    def __init__(self, name: str, folder: Path, progress: QueueProgress) -> None:
        if not self._busy.acquire(blocking=False):
            raise TooManyRequests("another model is being pulled: try again when it is here")
        self.trouble: str | None = None
        self._args = (name, folder, progress)
        threading.Thread(target=self._fetch, name="pull", daemon=True).start()

    def _fetch(self) -> None:
        name, folder, progress = self._args
        try:
            pull(name, models_dir=folder, progress=progress)
        except ModelError as error:
            self.trouble = str(error)
        except Exception:
            log.exception("pulling %s failed", name)
            self.trouble = f"pulling {name} failed; the server's log has the details"
        finally:
            self._busy.release()
            progress.end()


@pull_router.post("/api/pull")
async def pull_model(body: ModelRequest, request: Request) -> Response:
    """Fetch a model by its name in the catalogue or on the hub. It is served after the server was
    started with `--model NAME`; one that is served is there already."""
    models = models_of(request)
    name = bare(body.named, models)
    if not name:
        raise BadRequest("`model` is missing: the name of what is to be pulled.", param="model")
    if any(runtime.name == name for runtime in models.all):
        lines = [{"status": "pulling manifest"}, SUCCESS]
        content = b"".join(map(line, lines)) if body.stream is not False else line(SUCCESS)
        return Response(content, media_type=LineStream.media_type)
    if not caller_of(request).admin:
        raise Forbidden("pulling a model takes this machine's disk: it needs an admin's key")
    if body.stream is not False:
        return LineStream(_pulling(name, models), lambda: None)
    async for _ in _pulling(name, models):
        pass
    return JsonResponse(SUCCESS)


async def _pulling(name: str, models: ServedModels) -> AsyncGenerator[bytes, None]:
    """Lines until the model is here. The download goes on when nobody reads them any more: what has
    come is kept, and the next pull has less to do."""
    yield line({"status": "pulling manifest"})
    progress = QueueProgress()
    download = Download(name.removesuffix(LATEST), models.config.models_dir, progress)
    while (fields := await progress.lines.get()) is not None:
        yield line(fields)
    if download.trouble is not None:
        raise BadRequest(download.trouble, param="model")
    yield line({"status": f"start the server with --model {name} to serve it"})
    yield line(SUCCESS)
