"""Keeps the events of background responses, so that a client can leave and resume the stream."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Coroutine, Iterator, Mapping
from typing import Any

from starlette.responses import Response

from rekindle.http.responses import KEEP_ALIVE_S, EventStream, SignOfLife, sse_comment, sse_event

BACKGROUND = "background_responses"  # key in the application's state
MAX_ENDED_BYTES = 16 << 20  # of the events of responses that have ended
ENDED = ("completed", "incomplete", "failed", "cancelled")  # statuses
Key = tuple[bytes, str]  # tenant and id of the response


class EventLog:
    """The events of one response. The place of an event is its sequence number."""

    def __init__(self) -> None:
        self._events: list[bytes] = []
        self._changed = asyncio.Event()  # replaced after each change
        self.is_over = False
        self.size_bytes = 0

    def add(self, chunk: bytes) -> None:
        """Add the events of a chunk. JSON has no line ends, so an empty line ends an event."""
        self._events += [event + b"\n\n" for event in chunk.split(b"\n\n") if event]
        self.size_bytes += len(chunk)
        self._notify()

    def end(self) -> None:
        self.is_over = True
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def after(self, number: int | None) -> AsyncGenerator[bytes, None]:
        """Yield the events after this number, or all of them, until the response has ended."""
        at = 0 if number is None else number + 1
        while at < len(self._events) or not self.is_over:
            if at < len(self._events):
                chunk, at = b"".join(self._events[at:]), len(self._events)
                yield chunk
            else:
                await self._changed.wait()


class BackgroundResponses:
    """The background responses that are being computed, and the events of those that ended last."""

    def __init__(self) -> None:
        self._logs: OrderedDict[Key, EventLog] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()

    def log(self, key: Key) -> EventLog | None:
        return self._logs.get(key)

    def start(self, key: Key, log: EventLog, work: Coroutine[Any, Any, None]) -> None:
        self._logs[key] = log
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def forget(self, key: Key) -> None:
        self._logs.pop(key, None)

    def forget_tenant(self, tenant: bytes) -> None:
        for key in [key for key in self._logs if key[0] == tenant]:
            del self._logs[key]

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        ended = {key: log for key, log in self._logs.items() if log.is_over}
        size_bytes = sum(log.size_bytes for log in ended.values())
        for key, log in ended.items():  # oldest first
            if size_bytes <= MAX_ENDED_BYTES:
                return
            size_bytes -= log.size_bytes
            del self._logs[key]

    async def close(self) -> None:
        """Cancel what is being computed. What was generated so far stays in the model's cache."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def stream_of(
    events: AsyncGenerator[bytes, None], headers: Mapping[str, str] | None = None
) -> Response:
    """A stream that ends without any effect on the response when its client leaves."""
    ping = SignOfLife(KEEP_ALIVE_S, lambda: sse_comment("ping"))
    return EventStream(events, lambda: None, headers, sign_of_life=ping)


async def replayed(response: dict[str, Any], after: int | None) -> AsyncGenerator[bytes, None]:
    """Yield the events of a response that has ended and whose own events are gone.

    Its items come whole. The last event is always sent, because it has the whole response.
    """
    *events, last = _events(response)
    for number, event in enumerate(events):
        if after is None or number > after:
            yield _numbered(event, number)
    yield _numbered(last, len(events) if after is None else max(len(events), after + 1))


def _events(response: dict[str, Any]) -> Iterator[dict[str, Any]]:
    absent = dict.fromkeys(("completed_at", "error", "incomplete_details", "usage"))
    begun = {**response, **absent, "status": "in_progress", "output": []}
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    for index, item in enumerate(response["output"]):
        for what in ("added", "done"):
            yield {"type": f"response.output_item.{what}", "output_index": index, "item": item}
    status = response["status"]
    ending = "incomplete" if status == "cancelled" else status
    yield {"type": f"response.{ending}", "response": response}


def _numbered(event: dict[str, Any], number: int) -> bytes:
    return sse_event(event["type"], {**event, "sequence_number": number})


def interrupted(response: dict[str, Any]) -> dict[str, Any]:
    """What a client sees of a stored response that a stopped server left unfinished."""
    if response["status"] in ENDED:
        return response
    error = {
        "code": "server_error",
        "message": "The server was stopped before the response was complete: create it again.",
        "type": "server_error",
        "param": None,
    }
    return {**response, "status": "failed", "error": error}
