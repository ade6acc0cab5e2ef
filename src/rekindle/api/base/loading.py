"""Makes a request wait until its model is loaded, and keeps the model loaded until it is answered.

A stream that waits begins within three seconds. It sends the progress of the load as signs of life
in the form of its dialect, and then everything that the answer would have sent.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from rekindle.api.base.models import models_of
from rekindle.http.responses import (
    KEEP_ALIVE_S,
    EventStream,
    SignOfLife,
    sse_comment,
    while_connected,
)
from rekindle.worker.client import RuntimeClient

USES = "rekindle.uses"  # key in the scope: the models that a request keeps loaded

Answer = Callable[[], Awaitable[Response]]
Sign = Callable[[str, float], bytes]  # of life; takes the name of the model and the progress


class UsesMiddleware:
    """Releases the models that a request used when its response was sent."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        async with AsyncExitStack() as uses:
            scope[USES] = uses
            await self._app(scope, receive, send)


def uses_of(request: Request) -> AsyncExitStack:
    uses: AsyncExitStack = request.scope[USES]
    return uses


async def loaded(request: Request, runtime: RuntimeClient) -> RuntimeClient:
    """Load the model if needed, and keep it loaded until the request is answered.

    Raises ModelLoadFailed. A client that disconnects no longer waits.
    """
    use = uses_of(request).enter_async_context(models_of(request).pool.use(runtime))
    if models_of(request).pool.model(runtime).is_usable:
        await use
    else:
        await while_connected(request, use)
    return runtime


async def chosen(request: Request, number: str | None) -> list[RuntimeClient]:
    """The text model of this number, which is loaded if needed, or all loaded ones."""
    models = models_of(request)
    found = models.chosen(number)
    for runtime in found:
        if number is not None or models.pool.model(runtime).is_usable:
            await loaded(request, runtime)
    return found


def sse_progress(name: str, fraction: float) -> bytes:
    return sse_comment(f"loading {name}: {fraction:.0%}")


@dataclass(frozen=True, slots=True)
class Waiting:
    """How a stream waits for its model."""

    sign: Sign = sse_progress
    stream_class: type[EventStream] = EventStream


SSE = Waiting()


async def answer_when_loaded(
    request: Request,
    runtime: RuntimeClient,
    answer: Answer,
    *,
    stream: bool,
    waiting: Waiting = SSE,
) -> Response:
    """Answer once the model is loaded. A stream begins before that if loading takes long."""
    pool = models_of(request).pool
    if not stream or pool.model(runtime).is_usable:
        await loaded(request, runtime)
        return await answer()
    loading = asyncio.create_task(uses_of(request).enter_async_context(pool.use(runtime)))
    try:
        await while_connected(request, _wait(loading))
    except BaseException:
        await _cancelled(loading)
        raise
    if loading.done():
        loading.result()
        return await answer()
    return _LateStream(loading, runtime, answer, request, waiting).response


async def _wait(loading: asyncio.Task[None]) -> None:
    await asyncio.wait({loading}, timeout=KEEP_ALIVE_S)


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


class _LateStream:
    """A stream that has begun before its answer."""

    def __init__(
        self,
        loading: asyncio.Task[None],
        runtime: RuntimeClient,
        answer: Answer,
        request: Request,
        waiting: Waiting,
    ) -> None:
        self._loading = loading
        self._answer = answer
        self._model = models_of(request).pool.model(runtime)
        self._waiting = waiting
        sign = SignOfLife(KEEP_ALIVE_S, self._sign)
        self.response = waiting.stream_class(self._chunks(), self._close, sign_of_life=sign)

    def _close(self) -> None:
        self._loading.cancel()

    def _sign(self) -> bytes:
        return self._waiting.sign(self._model.name, self._model.fraction)

    async def _chunks(self) -> AsyncGenerator[bytes, None]:
        try:
            yield self._sign()
            await asyncio.wait({self._loading})
            self._loading.result()
        finally:
            await _cancelled(self._loading)
        response = await self._answer()
        if not isinstance(response, EventStream):
            yield bytes(response.body)
            return
        async with contextlib.aclosing(self.response.continue_as(response)) as chunks:
            async for chunk in chunks:
                yield chunk
