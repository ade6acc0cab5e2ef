"""The turns behind one HTTP request: one for each choice of each prompt."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable
from types import TracebackType
from typing import TypeVar

from starlette.requests import Request

from rekindle.errors import ServerError, Unavailable
from rekindle.events import Event, Failed, Finished, Started
from rekindle.runtime.process import Runtime
from rekindle.runtime.wire import Ask

T = TypeVar("T")


class ClientGone(Exception):
    """The client hung up before there was anything to answer."""


class FailedTurn(ServerError):
    """A turn's failure as the runtime told it."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(failed.message, param=failed.param)
        self.status, self.kind, self.code = failed.status, failed.kind, failed.code


class Turns:
    """Runs turns side by side and merges their events. Leaving the `with` cancels the rest."""

    def __init__(self, runtime: Runtime, asks: list[Ask]) -> None:
        self._runtime = runtime
        self._asks = asks
        self._merged: asyncio.Queue[tuple[int, Event | ServerError]] = asyncio.Queue()
        self._pumps: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Turns:
        self._pumps = [
            asyncio.create_task(self._pump(index, ask)) for index, ask in enumerate(self._asks)
        ]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _pump(self, index: int, ask: Ask) -> None:
        try:
            async with contextlib.aclosing(self._runtime.ask(ask)) as events:
                async for event in events:
                    self._merged.put_nowait((index, event))
        except ServerError as error:
            self._merged.put_nowait((index, error))

    async def events(self) -> AsyncIterator[tuple[int, Event]]:
        """Events with their turn's index, until every turn finished; a failure raises."""
        open_turns = len(self._asks)
        while open_turns:
            index, event = await self._merged.get()
            if isinstance(event, ServerError):
                raise event
            if isinstance(event, Failed):
                raise FailedTurn(event)
            yield index, event
            open_turns -= isinstance(event, Finished)

    async def started(self) -> list[tuple[int, Event]]:
        """Wait until one turn has begun to compute, so that its refusal can still be a status."""
        seen = []
        async for index, event in self.events():
            seen.append((index, event))
            if isinstance(event, Started | Finished):
                return seen
        raise Unavailable("the turn ended before it began")


async def while_connected(request: Request, answer: Awaitable[T]) -> T:
    """Await the answer, or give it up as soon as the client has gone."""
    work = asyncio.ensure_future(answer)
    leaving = asyncio.create_task(_gone(request))
    try:
        await asyncio.wait({work, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientGone
        return work.result()
    finally:
        leaving.cancel()
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive()).get("type") != "http.disconnect":
        pass
