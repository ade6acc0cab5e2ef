"""The turns behind one HTTP request: one for each choice of each prompt."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from msgspec import structs
from starlette.requests import Request

from rekindle.errors import ReportedError, ServerError, Unavailable
from rekindle.http.logs import current_id
from rekindle.http.responses import EventStream, disconnected
from rekindle.protocol.events import Cancelled, Delta, Event, Failed, Finished, Prefill, Started
from rekindle.protocol.frames import TurnRequest
from rekindle.protocol.requests import GenerateRequest
from rekindle.worker.client import RuntimeClient

T = TypeVar("T")

log = logging.getLogger("rekindle.turn")

LOG_EVERY_S = 5.0


class ClientGone(Exception):
    """The client disconnected before there was anything to answer."""


class PrefillLog:
    """Logs about every five seconds how far each prompt has come."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._request_id = current_id()  # events come outside of the request's context
        self._last_s: dict[int, float] = {}  # by turn: its start, or its last line

    def record(self, event: Event) -> None:
        match event:
            case Started():
                self._last_s[event.turn] = self._clock()
            case Prefill():
                self._log(event)

    def _log(self, event: Prefill) -> None:
        now = self._clock()
        if now - self._last_s.setdefault(event.turn, now) >= LOG_EVERY_S:
            self._last_s[event.turn] = now
            log.info(
                "turn %d: %d of %d prompt tokens read",
                event.turn,
                event.done_tokens,
                event.prompt_tokens,
                extra={"request_id": self._request_id},
            )


class Turns:
    """Runs turns side by side and merges their events. Closing it cancels those still open."""

    def __init__(
        self,
        runtime: RuntimeClient,
        requests: list[GenerateRequest],
        received_s: float | None = None,
    ) -> None:
        """`received_s`: when the HTTP request arrived, for the time that its stages took."""
        self._runtime = runtime
        self._progress = [each.progress for each in requests for _ in each.turns]
        self._unfinished = len(self._progress)
        self._merged: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._turns: list[int] = []
        self._prefill_log = PrefillLog()
        #: Offered each part of a reply for which `next` waits; True: it goes on waiting.
        self.on_part: Callable[[int, Delta], bool] = _leave_to_next
        self._is_waiting = False  # `next` is
        try:
            for request in requests:
                request = structs.replace(request, received_s=received_s)
                on_event = partial(self._on_event, len(self._turns))
                self._turns += runtime.submit(request, on_event)
        except ServerError:
            self.close()
            raise

    def close(self) -> None:
        self.on_part = _leave_to_next  # or it keeps the stream, which keeps this and the request
        for turn in self._turns:
            self._runtime.cancel(turn)

    def give_up(self) -> None:
        """Cancel them on behalf of another request; whoever waits for an event learns it."""
        self.close()
        self._merged.put_nowait((0, Cancelled(self._turns[0])))

    def _on_event(self, first: int, choice: int, event: Event) -> None:
        if isinstance(event, Delta):
            is_next = self._is_waiting and self._merged.empty()
            if is_next and self.on_part(first + choice, event):
                return
        else:
            self._prefill_log.record(event)  # not in `next`: a slow client delays that
        self._merged.put_nowait((first + choice, event))

    @property
    def open(self) -> bool:
        """Whether a turn has not finished yet."""
        return self._unfinished > 0

    async def next(self) -> tuple[int, Event]:
        """The next event with its turn's index; a failure raises."""
        self._is_waiting = True
        try:
            index, event = await self._merged.get()
        finally:
            self._is_waiting = False
        if isinstance(event, Failed):
            raise ReportedError(event.error)
        if isinstance(event, Cancelled):  # by nobody who waits here
            raise Unavailable("the request was cancelled by the server; send it again")
        self._unfinished -= isinstance(event, Finished)
        return index, event

    async def arrived(self) -> list[tuple[int, Event]]:
        """The next event, and those that have come with it, to be written at once; a failure raises
        when all before it have been returned."""
        events = [await self.next()]
        while self.open and not self._merged.empty():
            index, event = self._merged.get_nowait()
            if isinstance(event, Failed | Cancelled):
                self._merged.put_nowait((index, event))
                break
            self._unfinished -= isinstance(event, Finished)
            events.append((index, event))
        return events

    async def begun(self) -> list[tuple[int, Event]]:
        """The events up to the first to be sent: until then a failure can still be a status."""
        seen = []
        while self.open:
            index, event = await self.next()
            seen.append((index, event))
            if isinstance(event, Delta | Finished):
                break
            if isinstance(event, Started) and self._progress[index]:
                break
        return seen

    async def begun_within(self, wait_s: float) -> list[tuple[int, Event]]:
        """The same, or nothing: a turn that has to wait for its place does not keep its client
        waiting for a sign."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                return await self.begun()
        return []


def _leave_to_next(_index: int, _delta: Delta) -> bool:
    return False


def write_on_arrival(
    turns: Turns, stream: EventStream, chunks: Callable[[list[tuple[int, Event]]], bytes]
) -> EventStream:
    """Have a stream's parts written as they come, while it waits for them: waking its task costs
    as much as all else about a token."""

    def on_part(index: int, delta: Delta) -> bool:
        if not stream.is_writable:
            return False
        try:
            stream.write(chunks([(index, delta)]))
        except Exception:  # not in whoever delivers to all turns
            log.exception("unexpected error in a stream")
            return False
        return True

    turns.on_part = on_part
    return stream


async def result_of(runtime: RuntimeClient, request: TurnRequest, kind: type[T]) -> T:
    """The one event that a turn without a reply ends with; a failure raises. Giving up on it
    cancels the turn."""
    async with contextlib.aclosing(runtime.stream(request)) as events:
        async for event in events:
            if isinstance(event, kind):
                return event
            if isinstance(event, Failed):
                raise ReportedError(event.error)
    raise Unavailable("the request was cancelled by the server; send it again")


async def while_connected(request: Request, answer: Coroutine[Any, Any, T]) -> T:
    """Await the answer; cancel it as soon as the client disconnects."""
    work = asyncio.create_task(answer)
    disconnect = asyncio.create_task(disconnected(request.receive))
    try:
        await asyncio.wait({work, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientGone
        return work.result()
    except asyncio.CancelledError:
        raise Unavailable("the server is stopping; send the request again") from None
    finally:
        disconnect.cancel()
        work.cancel()
        await asyncio.gather(work, disconnect, return_exceptions=True)
