"""Turns the events of a request's turns into one HTTP answer, whole or streamed, in any dialect.

A dialect subclasses `Reply` and supplies the formatting. The order of events, disconnects, errors
after the first byte and keep-alives are handled here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import orjson
from msgspec import structs
from starlette.requests import Request
from starlette.responses import Response

from rekindle.api.base.admin import refine_reason
from rekindle.errors import ReportedError, ServerError, Unavailable
from rekindle.http.limits import current_tenant
from rekindle.http.logs import current_id
from rekindle.http.middleware import received_s
from rekindle.http.responses import (
    KEEP_ALIVE_S,
    EventStream,
    JsonResponse,
    SignOfLife,
    error_format,
    sse_comment,
    while_connected,
)
from rekindle.protocol.events import (
    Cancelled,
    Delta,
    Embedded,
    Event,
    Failed,
    Finished,
    Part,
    Prefill,
    Ranked,
    Started,
    TokenLogprob,
)
from rekindle.protocol.frames import TurnRequest
from rekindle.protocol.requests import GenerateRequest
from rekindle.worker.client import RuntimeClient

T = TypeVar("T")
#: Called with the index of a turn and a part of its reply. True means that the part is handled.
OnDelta = Callable[[int, Delta], bool]

log = logging.getLogger("rekindle.turn")

LOG_EVERY_S = 5.0


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


class Turns:
    """Runs turns concurrently, one for each choice of each prompt. `close` cancels open ones."""

    def __init__(
        self,
        runtime: RuntimeClient,
        requests: list[GenerateRequest],
        received_s: float | None = None,
        on_delta: OnDelta | None = None,
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
        self._on_delta = None  # frees its owner, which holds the request, without a cycle
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
            if is_next and self._on_delta and self._on_delta(first + choice, event):
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

    async def first_events(self, timeout_s: float) -> list[tuple[int, Event]]:
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


def vectors(embedded: Embedded) -> Any:
    """Return a float32 array: its JSON is half as long as that of Python's floats."""
    import numpy as np  # slow to import, and most servers do not need it

    return np.frombuffer(embedded.vectors, "<f4").reshape(-1, embedded.dimensions)


def embedder_usage(result: Embedded | Ranked) -> dict[str, Any]:
    return {
        "prompt_tokens": result.prompt_tokens,
        "total_tokens": result.prompt_tokens,
        "prompt_tokens_details": {"cached_tokens": result.reused_tokens},
    }


class VectorsResponse(Response):
    """JSON with NumPy arrays in it."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)


IGNORED_TOOLS_HEADER = "x-ignored-tools"
UNENFORCED_HEADER = "x-unenforced-grammars"  # names custom tools


class Reply(ABC):
    """The answer to one HTTP request, which runs one or several turns."""

    stream_class: type[EventStream] = EventStream
    keep_alive_s = KEEP_ALIVE_S  # silence after which a stream begins, or sends `keep_alive`

    def __init__(
        self,
        http: Request,
        runtime: RuntimeClient,
        requests: list[GenerateRequest],
        *,
        headers: Mapping[str, str] | None = None,
        others: Sequence[RuntimeClient] = (),
    ) -> None:
        """`others` are the other models. One of them may have the state that the request names."""
        self._http = http
        self._runtime = runtime
        self._requests = requests
        self._headers = headers
        self._others = others
        self._tenant = current_tenant()  # events arrive outside of the request's context
        self._finished: dict[int, Finished] = {}  # by the turn's index
        self._turns: Turns | None = None
        self._stream: EventStream | None = None

    # -- formatting, supplied by the dialect ---------------------------------------------------

    @abstractmethod
    def add(self, index: int, part: Part) -> None:
        """Collect a part of a reply that is sent whole."""

    @abstractmethod
    async def body(self) -> Any:
        """The whole answer, once all turns have finished."""

    def begin(self) -> bytes:
        return b""

    @abstractmethod
    def chunks(self, index: int, event: Event) -> list[bytes]:
        """What a stream sends for one event. Runs for every token."""

    async def end(self) -> bytes:
        """The last bytes of a stream, once all turns have finished."""
        return b""

    def keep_alive(self) -> bytes:
        """What a stream sends while there is nothing else to send."""
        return sse_comment("waiting")

    def error_event(self, error: ServerError) -> bytes:
        """How an error ends a stream after its first byte."""
        return error_format(self._http.scope).event(error)

    def is_streamed_error(self, error: ServerError) -> bool:
        """Whether a stream reports this error as an event even before its first byte."""
        return False

    # -- running -------------------------------------------------------------------------------

    @property
    def finished(self) -> list[Finished]:
        """The ends of the turns so far, in the order of the choices."""
        return [self._finished[index] for index in sorted(self._finished)]

    async def respond(self, *, stream: bool) -> Response:
        """Start the turns and answer. They are closed however this ends."""
        try:
            self._turns = turns = Turns(
                self._runtime, self._requests, received_s(self._http), self._write_delta
            )
            if stream:
                return await self._start_stream(turns)
            body = await while_connected(self._http, self._collect(turns))
        except BaseException:
            self.close()
            raise
        self.close()
        return JsonResponse(body, headers=self._headers)

    def close(self) -> None:
        self._stream = None  # it refers to this method
        if self._turns is not None:
            self._turns.close()

    async def _collect(self, turns: Turns) -> Any:
        while turns.open:
            for index, event in await turns.collect():
                if isinstance(event, Delta):
                    self.add(index, event.part)
                else:
                    self._record(index, event)
        await self._refine_report()
        return await self.body()

    async def _start_stream(self, turns: Turns) -> EventStream:
        try:
            first = await while_connected(self._http, turns.first_events(self.keep_alive_s))
            chunks = self._chunks(turns, first)
        except ServerError as error:
            if not self.is_streamed_error(error):
                raise
            chunks = self._refusal(error)
        sign_of_life = SignOfLife(self.keep_alive_s, self.keep_alive)
        self._stream = self.stream_class(
            chunks, self.close, self._headers, self.error_event, sign_of_life
        )
        return self._stream

    async def _refusal(self, error: ServerError) -> AsyncGenerator[bytes, None]:
        yield self.begin() + self.error_event(error)

    async def _chunks(
        self, turns: Turns, first: list[tuple[int, Event]]
    ) -> AsyncGenerator[bytes, None]:
        if begin := self.begin() or (b"" if first else self.keep_alive()):
            yield begin
        if not turns.is_abandoned and (chunks := self._joined(first)):
            yield chunks
        while turns.open:
            if chunks := self._joined(await turns.collect()):
                yield chunks
        await self._refine_report()
        if chunks := await self.end():
            yield chunks

    def _joined(self, events: list[tuple[int, Event]]) -> bytes:
        """Format events as one chunk: a write costs as much as everything else about a token."""
        chunks = []
        for index, event in events:
            self._record(index, event)
            chunks += self.chunks(index, event)
        return b"".join(chunks)

    def _write_delta(self, index: int, delta: Delta) -> bool:
        """Write a part as it arrives. Waking the stream's task would double the cost of a token."""
        stream = self._stream
        if stream is None or not stream.is_writable:
            return False
        try:
            stream.write(b"".join(self.chunks(index, delta)))
        except Exception:  # it must not reach the caller, who delivers the events of all turns
            log.exception("unexpected error in a stream")
            return False
        return True

    def _record(self, index: int, event: Event) -> None:
        if isinstance(event, Finished):
            self._finished[index] = event
            tenant = f"tenant {self._tenant}, " if self._tenant else ""
            log.info("%s%s", tenant, log_line(event))

    async def _refine_report(self) -> None:
        """Refine the reason in the report of the first turn, which is the turn with the names."""
        request = self._requests[0]
        if request.names and request.names.cache_key and (first := self._finished.get(0)):
            first.cache.reason = await refine_reason(
                first.cache.reason, request.names.cache_key, self._others, request.salt
            )


def x_cache(turns: Sequence[Finished], choices: int = 1) -> dict[str, Any]:
    """Report what was reused, and why not more.

    Several prompts are added up. The reason is that of the first prompt that is not a full hit.
    `hit` is true if any token of message content was reused.
    """
    reports = [turn.cache for turn in turns[::choices]]
    shown = next((report for report in reports if report.status != "hit"), reports[0])
    statuses = {report.status for report in reports}
    status = shown.status if len(statuses) == 1 else "partial_hit"
    fields: dict[str, Any] = {
        "hit": status != "miss",
        "status": status,
        "cache_key": reports[0].cache_key,
        "reused_tokens": sum(report.reused_tokens for report in reports),
        "new_cache_key": reports[0].new_cache_key,
        "cached_tokens": sum(report.cached_tokens for report in reports),
        "reason": shown.reason,
        "tier": next((report.tier for report in reports if report.tier), None),
        "kv_bits": min((report.kv_bits for report in reports if report.kv_bits), default=None),
    }
    if group_size := next((each.kv_group_size for each in reports if each.kv_group_size), None):
        fields["kv_group_size"] = group_size
    if shown.diverged_at is not None:
        fields["diverged_at"] = structs.asdict(shown.diverged_at)
    if normalised := dict.fromkeys(what for report in reports for what in report.normalised):
        fields["normalised"] = list(normalised)
    return fields


def log_line(turn: Finished) -> str:
    """Summarise what a turn reused, computed and generated."""
    cache = turn.cache
    source = f" from {cache.tier}" if cache.tier else ""
    return (
        f"{turn.prompt_tokens} prompt tokens: {cache.reused_tokens} reused{source} "
        f"({cache.status}, {cache.reason}), the rest in {turn.prompt_eval_s:.2f} s; "
        f"{turn.completion_tokens} generated ({turn.reason})"
    )


def is_complete(arguments: str) -> bool:
    """Whether a call that was cut off has all of its arguments."""
    try:
        return isinstance(orjson.loads(arguments), dict)
    except orjson.JSONDecodeError:
        return False


def token_logprobs(logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """Each token with the best alternatives, as OpenAI's APIs show them."""
    return [
        {
            **_token(token.piece, token.logprob),
            "top_logprobs": [_token(piece, logprob) for piece, logprob in token.top],
        }
        for token in logprobs
    ]


def _token(piece: bytes, logprob: float) -> dict[str, Any]:
    return {
        "token": piece.decode(errors="replace"),
        "logprob": max(logprob, -9999.0),  # as OpenAI does: JSON has no minus infinity
        "bytes": list(piece),
    }


def ignored_headers(ignored: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Headers that name what the server ignored in the request: at most 32 names in each."""
    return {
        header: ", ".join(re.sub(r"[^A-Za-z0-9_.-]", "?", name[:128]) for name in names[:32])
        for header, names in ignored.items()
        if names
    }
