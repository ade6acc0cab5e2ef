"""The turns behind one HTTP request: one for each choice of each prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request

from rekindle.errors import ReportedError, ServerError, Unavailable
from rekindle.protocol.events import Delta, Event, Failed, Finished, Started
from rekindle.protocol.requests import GenerateRequest
from rekindle.server.prefill_log import PrefillLog
from rekindle.server.runtime_client import RuntimeClient

T = TypeVar("T")


class ClientGone(Exception):
    """The client hung up before there was anything to answer."""


class Turns:
    """Runs turns side by side and merges their events. Closing it cancels those still open."""

    def __init__(self, runtime: RuntimeClient, asks: list[GenerateRequest]) -> None:
        self._runtime = runtime
        self._asks = asks
        self._unfinished = len(asks)
        self._merged: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._turns: list[int] = []
        self._prefills = PrefillLog()
        try:
            for index, ask in enumerate(asks):
                self._turns.append(runtime.submit(ask, partial(self._deliver, index)))
        except ServerError:
            self.close()
            raise

    def close(self) -> None:
        for turn in self._turns:
            self._runtime.leave(turn)

    def _deliver(self, index: int, event: Event) -> None:
        self._prefills.hear(event)  # here and not in `next`, which a slow client may keep waiting
        self._merged.put_nowait((index, event))

    @property
    def open(self) -> bool:
        """Whether a turn has not finished yet."""
        return self._unfinished > 0

    async def next(self) -> tuple[int, Event]:
        """The next event with its turn's index; a failure raises."""
        index, event = await self._merged.get()
        if isinstance(event, Failed):
            raise ReportedError(event.error)
        self._unfinished -= isinstance(event, Finished)
        return index, event

    async def begun(self) -> list[tuple[int, Event]]:
        """The events up to the first to be shown: until then a failure can still be a status."""
        seen = []
        while self.open:
            index, event = await self.next()
            seen.append((index, event))
            if isinstance(event, Delta | Finished):
                break
            if isinstance(event, Started) and self._asks[index].progress:
                break
        return seen


async def while_connected(request: Request, answer: Coroutine[Any, Any, T]) -> T:
    """Await the answer, or give it up as soon as the client has gone."""
    work = asyncio.create_task(answer)
    leaving = asyncio.create_task(_gone(request))
    try:
        await asyncio.wait({work, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientGone
        return work.result()
    except asyncio.CancelledError:
        raise Unavailable("the server is stopping; send the request again") from None
    finally:
        leaving.cancel()
        work.cancel()
        await asyncio.gather(work, leaving, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive()).get("type") != "http.disconnect":
        pass
