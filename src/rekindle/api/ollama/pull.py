"""POST /api/pull: a model is fetched to this machine, with lines of progress."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from rekindle.api.ollama.answer import LineStream
from rekindle.api.ollama.errors import RESPONSES, line
from rekindle.api.ollama.names import LATEST, bare
from rekindle.api.ollama.schema import ModelRequest
from rekindle.errors import BadRequest, Forbidden, ModelError, TooManyRequests
from rekindle.models.pull import pull
from rekindle.server.auth import caller_of
from rekindle.server.json_route import JsonRoute
from rekindle.server.models import ServedModels, models_of
from rekindle.server.responses import JsonResponse

log = logging.getLogger("rekindle.api")

SUCCESS = {"status": "success"}

router = APIRouter(route_class=JsonRoute, tags=["ollama"], responses=RESPONSES)


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


@router.post("/api/pull")
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
