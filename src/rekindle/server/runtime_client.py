"""The front's side of a runtime: the child process, its turns, its restarts."""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncGenerator, Callable

from msgspec import structs

from rekindle.errors import (
    ModelError,
    ReportedError,
    RuntimeDied,
    ServerError,
    TooManyRequests,
    Unavailable,
)
from rekindle.protocol.admin import AdminOp, AdminReply, AdminRequest, AdminResult
from rekindle.protocol.events import TERMINAL, Event, Failed
from rekindle.protocol.frames import (
    Events,
    FrameReader,
    LoadFailed,
    Loading,
    LogLine,
    Ready,
    ToFront,
    ToRuntime,
    frame,
)
from rekindle.protocol.requests import Cancel, GenerateRequest, LoadModel, Stop

log = logging.getLogger("rekindle.runtime")

RESTART_DELAYS_S = (0.1, 1.0, 5.0, 30.0)  # the last one repeats
STOP_S = 120.0  # what a runtime gets to write its state to disk

OnLoading = Callable[[float], None]
Deliver = Callable[[Event], None]
News = asyncio.Queue[ToFront | None]  # of a runtime's life; None: it is gone


class RuntimeClient:
    """One model in a process of its own. A death costs the turns in flight, never the server."""

    def __init__(self, name: str, load: LoadModel, *, queue: int) -> None:
        self.name = name
        self._load = load
        self._most_turns = load.parallel + queue
        self._turns: dict[int, Deliver] = {}
        self._queries: dict[int, asyncio.Future[AdminResult]] = {}
        self._ids = itertools.count(1)
        self._process: Process | None = None
        self._transport: asyncio.WriteTransport | None = None
        self._watcher: asyncio.Task[None] | None = None
        self.ready: Ready | None = None
        self.restarts = 0

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def turns(self) -> int:
        return len(self._turns)

    async def start(self, on_loading: OnLoading = lambda _fraction: None) -> None:
        """Load the model; raises ModelError when it cannot be loaded."""
        news = await self._spawn()
        await self._await_ready(news, on_loading)
        self._watcher = asyncio.create_task(self._watch(news))

    async def stop(self) -> None:
        """End the process: kindly first, then for certain. Turns in flight are told."""
        self.ready = None
        if self._watcher:
            self._watcher.cancel()
        self._fail_turns(Unavailable("the server is stopping"))
        if self._process is None:
            return
        self._send(Stop())
        try:
            await asyncio.wait_for(self._process.wait(), STOP_S)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        self._hang_up()

    def submit(self, ask: GenerateRequest, deliver: Deliver) -> int:
        """Begin a turn: `deliver` is called with its events, up to its terminal one."""
        if self.ready is None:
            raise Unavailable(f"model {self.name} is loading; try again in a moment")
        if len(self._turns) >= self._most_turns:
            raise TooManyRequests(
                f"{len(self._turns)} requests are already queued or running; try again later"
            )
        turn = next(self._ids)
        self._turns[turn] = deliver
        self._send(structs.replace(ask, turn=turn))
        return turn

    def leave(self, turn: int) -> None:
        """Nobody listens any more: cancel the turn, unless it has ended."""
        if self._turns.pop(turn, None) is not None and self.ready is not None:
            self._send(Cancel(turn))

    async def ask(self, ask: GenerateRequest) -> AsyncGenerator[Event, None]:
        """Events of one turn, up to its terminal one; leaving early cancels the turn."""
        events: asyncio.Queue[Event] = asyncio.Queue()
        turn = self.submit(ask, events.put_nowait)
        try:
            ended = False
            while not ended:
                event = await events.get()
                ended = isinstance(event, TERMINAL)
                yield event
        finally:
            self.leave(turn)

    async def query(self, op: AdminOp, *, salt: bytes, admin: bool = False) -> AdminResult:
        """Ask about the cache; an error that comes back is raised."""
        if self.ready is None:
            raise Unavailable(f"model {self.name} is loading; try again in a moment")
        number = next(self._ids)
        asked: asyncio.Future[AdminResult] = asyncio.get_running_loop().create_future()
        self._queries[number] = asked
        try:
            self._send(AdminRequest(id=number, salt=salt, admin=admin, op=op))
            return await asked
        finally:
            del self._queries[number]

    def _resolve(self, reply: AdminReply) -> None:
        asked = self._queries.get(reply.id)
        if asked is None or asked.done():
            return
        if reply.result is not None:
            asked.set_result(reply.result)
        else:
            assert reply.error is not None, "a reply has a result or an error"
            asked.set_exception(ReportedError(reply.error))

    def _hang_up(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _send(self, message: ToRuntime) -> None:
        assert self._transport is not None
        self._transport.write(frame(message))

    async def _spawn(self) -> News:
        self._hang_up()
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "rekindle.runtime.main",
                str(theirs.fileno()),
                pass_fds=[theirs.fileno()],
            )
        news: News = asyncio.Queue()

        def on_message(message: ToFront | None) -> None:
            match message:
                case Events(events):
                    self._deliver(events)
                case AdminReply():
                    self._resolve(message)
                case LogLine(level, text):
                    log.log(logging.getLevelNamesMapping()[level.upper()], "%s", text)
                case _:
                    news.put_nowait(message)

        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_connection(
            lambda: FrameReader(on_message), sock=ours
        )
        self._send(self._load)
        return news

    async def _await_ready(self, news: News, on_loading: OnLoading) -> None:
        while True:
            match await news.get():
                case Loading(fraction):
                    on_loading(fraction)
                case Ready() as ready:
                    self.ready = ready
                    return
                case LoadFailed(message):
                    raise ModelError(message)
                case _:
                    assert self._process is not None
                    status = await self._process.wait()
                    raise ModelError(
                        f"the runtime of {self.name} died while loading (exit status {status}): "
                        "the model file may be damaged, or memory too small"
                    )

    async def _watch(self, news: News) -> None:
        """When the process dies, say so to every turn and start it again."""
        while True:
            while await news.get() is not None:
                pass
            assert self._process is not None
            status = await self._process.wait()
            self._abandon(status)
            news = await self._restart()

    def _deliver(self, events: list[Event]) -> None:
        for event in events:
            if deliver := self._turns.get(event.turn):
                if isinstance(event, TERMINAL):
                    del self._turns[event.turn]
                deliver(event)

    def _abandon(self, status: int) -> None:
        self.ready = None
        log.error("runtime of %s died (exit status %s); restarting it", self.name, status)
        error = RuntimeDied(
            f"the process running model {self.name} died (exit status {status}) and is being "
            "restarted; send the request again"
        )
        self._fail_turns(error)

    def _fail_turns(self, error: ServerError) -> None:
        self._deliver([Failed(turn, error.info) for turn in self._turns])
        for asked in self._queries.values():
            if not asked.done():
                asked.set_exception(error)

    async def _restart(self) -> News:
        for attempt in itertools.count():
            await asyncio.sleep(RESTART_DELAYS_S[min(attempt, len(RESTART_DELAYS_S) - 1)])
            try:
                news = await self._spawn()
                await self._await_ready(news, lambda _fraction: None)
            except (ModelError, OSError) as error:
                log.error("restarting %s failed: %s", self.name, error)
            else:
                self.restarts += 1
                log.warning("runtime of %s is back", self.name)
                return news
        raise AssertionError("unreachable")
