"""Runs the turns behind one HTTP request and merges their events."""

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
from rekindle.http.responses import disconnected
from rekindle.protocol.events import Cancelled, Delta, Event, Failed, Finished, Prefill, Started
from rekindle.protocol.frames import TurnRequest
from rekindle.protocol.requests import GenerateRequest
from rekindle.worker.client import RuntimeClient

T = TypeVar("T")
#: Called with the index of a turn and a part of its reply. True means that the part is handled.
OnDelta = Callable[[int, Delta], bool]

log = logging.getLogger("rekindle.turn")

LOG_EVERY_S = 5.0


class ClientGone(Exception):
    """The client disconnected before the answer began."""


class PrefillLog:
    """Logs the prefill progress of each turn every five seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._request_id = current_id()  # events arrive outside of the request's context
        self._last_s: dict[int, float] = {}  # by turn: its start, or its last line

    def record(self, event: Event) -> None:
        if isinstance(event, Started):
            self._last_s[event.turn] = self._clock()
        elif isinstance(event, Prefill):
            now = self._clock()
            if now - self._last_s.setdefault(event.turn, now) < LOG_EVERY_S:
                return
            self._last_s[event.turn] = now
            log.info(
                "turn %d: %d of %d prompt tokens read",
                event.turn,
                event.done_tokens,
                event.prompt_tokens,
                extra={"request_id": self._request_id},
            )


def _queue_delta(_index: int, _delta: Delta) -> bool:
    return False


class Turns:
    """Runs turns concurrently, one for each choice of each prompt. `close` cancels open ones."""

    def __init__(
        self,
        runtime: RuntimeClient,
        requests: list[GenerateRequest],
        received_s: float | None = None,
        on_delta: OnDelta = _queue_delta,
    ) -> None:
        """`received_s` is when the HTTP request arrived. `on_delta` gets each part for which
        `collect` waits. If it handles the part, `collect` continues to wait."""
        self._runtime = runtime
        self._progress = [each.progress for each in requests for _ in each.turns]
        self._unfinished = len(self._progress)
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._turns: list[int] = []
        self._prefill_log = PrefillLog()
        self._on_delta = on_delta
        self._is_waiting = False  # for the next event
        self.is_abandoned = False  # another request has cancelled the turns
        try:
            for request in requests:
                request = structs.replace(request, received_s=received_s)
                on_event = partial(self._on_event, len(self._turns))
                self._turns += runtime.submit(request, on_event)
        except ServerError:
            self.close()
            raise

    def close(self) -> None:
        self._on_delta = _queue_delta  # frees its owner, which holds the request, without a cycle
        for turn in self._turns:
            self._runtime.cancel(turn)

    def abandon(self) -> None:
        """Cancel the turns on behalf of another request and wake up `collect`."""
        self.is_abandoned = True
        self.close()
        self._events.put_nowait((0, Cancelled(self._turns[0])))

    def _on_event(self, first: int, choice: int, event: Event) -> None:
        if isinstance(event, Delta):
            is_next = self._is_waiting and self._events.empty()
            if is_next and self._on_delta(first + choice, event):
                return
        else:
            self._prefill_log.record(event)  # here, because a slow client delays `collect`
        self._events.put_nowait((first + choice, event))

    @property
    def open(self) -> bool:
        return self._unfinished > 0 and not self.is_abandoned

    async def next(self) -> tuple[int, Event]:
        """Wait for the next event and return it with its turn's index. Raises if a turn failed."""
        self._is_waiting = True
        try:
            index, event = await self._events.get()
        finally:
            self._is_waiting = False
        if isinstance(event, Failed):
            raise ReportedError(event.error)
        if isinstance(event, Cancelled):
            raise Unavailable("the request was cancelled by the server; send it again")
        self._unfinished -= isinstance(event, Finished)
        return index, event

    async def collect(self) -> list[tuple[int, Event]]:
        """Wait for the next event; return all that have arrived, to be written together.

        A failure is raised after the events before it. Abandoned turns return nothing.
        """
        try:
            events = [await self.next()]
        except Unavailable:
            if self.is_abandoned:
                return []
            raise
        while self.open and not self._events.empty():
            index, event = self._events.get_nowait()
            if isinstance(event, Failed | Cancelled):
                self._events.put_nowait((index, event))
                break
            self._unfinished -= isinstance(event, Finished)
            events.append((index, event))
        return [] if self.is_abandoned else events

    async def first_events(self, timeout_s: float | None = None) -> list[tuple[int, Event]]:
        """Wait for the first event that the client gets. Until then a failure can set the status.

        Returns nothing after `timeout_s`, so that a queued turn does not keep its client waiting.
        """
        seen: list[tuple[int, Event]] = []
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.open and not any(self._is_sent(*each) for each in seen):
                    seen += await self.collect()
        return seen

    def _is_sent(self, index: int, event: Event) -> bool:
        if isinstance(event, Started):
            return self._progress[index]
        return isinstance(event, Delta | Finished)


async def result_of(runtime: RuntimeClient, request: TurnRequest, kind: type[T]) -> T:
    """Run a turn that ends with a single result, such as embeddings. Raises if it failed."""
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
