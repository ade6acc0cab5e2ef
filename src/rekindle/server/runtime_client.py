"""The front's side of a model: its turns, its admin requests, and restarts of its process."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

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
from rekindle.protocol.frames import Events, Heartbeat, LogLine, Ready, TurnRequest
from rekindle.protocol.requests import Cancel, LoadModel
from rekindle.server.model_file import ModelFile
from rekindle.server.open_turns import OpenTurns
from rekindle.server.request_id import current_id
from rekindle.server.runtime_process import AfterLoading, OnLoading, RuntimeProcess
from rekindle.server.watchdog import Watchdog

log = logging.getLogger("rekindle.runtime")

MOST_UNSENT_BYTES = 128 << 20  # that a runtime is behind with reading
RESTART_DELAYS_S = (0.1, 1.0, 5.0, 30.0)  # the last one repeats
WATCH_S = 1.0  # between two looks at whether there is progress
MOST_ADMIN_REQUESTS = 64  # of one tenant at a time

OnEvent = Callable[[int, Event], None]  # with the choice's number in its request, from 0


class _AdminCall(NamedTuple):
    salt: bytes  # of the tenant that asks
    result: asyncio.Future[AdminResult]


class RuntimeClient:
    """One model in a process of its own. A crash fails the turns in flight, never the server."""

    def __init__(
        self, name: str, load: LoadModel, *, queue: int, step_timeout_s: float = 300.0
    ) -> None:
        self.name = name
        self._load = load
        self._turns = OpenTurns(load.settings.parallel + queue)
        self._admin_requests: dict[int, _AdminCall] = {}  # that were not answered
        self._ids = itertools.count(1)
        self._process: RuntimeProcess | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._watchdog = Watchdog(step_timeout_s)
        self.ready: Ready | None = None
        self.down_reason = "a model is loading"  # as long as there is none that is ready
        self.restarts = 0

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def loaded(self) -> Ready:
        """What the model is like; raises Unavailable while it is not loaded."""
        if self.ready is None:
            raise self._still_loading()
        return self.ready

    @property
    def modalities(self) -> tuple[str, ...]:
        """What a prompt may hold; raises Unavailable likewise."""
        return self.loaded.modalities

    @property
    def file(self) -> ModelFile:
        return ModelFile.at(Path(self._load.path))

    @property
    def turns(self) -> int:
        return len(self._turns)

    @property
    def watchdog_fired(self) -> int:
        """Times the process was replaced because it made no progress."""
        return self._watchdog.fired

    # -- the process ---------------------------------------------------------------------------

    async def start(self, on_loading: OnLoading = lambda _fraction: None) -> None:
        """Load the model; raises ModelError when it cannot be loaded."""
        self._watcher = asyncio.create_task(self._watch(await self._spawn(on_loading)))

    async def stop(self) -> None:
        """End the process; turns in flight fail."""
        self.ready = None
        if self._watcher:
            self._watcher.cancel()
        self._fail_all(Unavailable("the server is stopping"))
        if self._process is not None:
            await self._process.stop()

    async def _spawn(self, on_loading: OnLoading) -> RuntimeProcess:
        if self._process is not None:
            self._process.close()
        self._process = await RuntimeProcess.spawn(self.name, self._load, self._receive)
        self.ready = await self._process.ready(on_loading)
        self._watchdog.hear()
        return self._process

    async def _watch(self, process: RuntimeProcess) -> None:
        """When the process dies, fail its turns and start it again."""
        while True:
            end = await self._end_of(process)
            self._fail_all(
                RuntimeDied(
                    f"the process running model {self.name} {end} and is being restarted; "
                    "send the request again"
                )
            )
            process = await self._restart()

    async def _end_of(self, process: RuntimeProcess) -> str:
        """How a process ended that nobody stopped; one that is stuck is ended."""
        died = asyncio.create_task(process.died())
        try:
            while not died.done() and not self._watchdog.fires():
                await asyncio.wait({died}, timeout=WATCH_S)
            is_stuck = not died.done()
            end = f"made no progress for {self._watchdog.stalled_s:.0f} s" if is_stuck else "died"
            self.down_reason = f"the process of a model {end} and is being restarted"
            self.ready = None
            if is_stuck:
                await process.abort()
            end += f" (exit status {await died})"
        finally:
            died.cancel()
        log.error("runtime of %s %s; restarting it", self.name, end)
        return end

    async def _restart(self) -> RuntimeProcess:
        for attempt in itertools.count():
            await asyncio.sleep(RESTART_DELAYS_S[min(attempt, len(RESTART_DELAYS_S) - 1)])
            try:
                process = await self._spawn(lambda _fraction: None)
            except (ModelError, OSError) as error:
                log.error("restarting %s failed: %s", self.name, error)
            else:
                self.restarts += 1
                log.warning("runtime of %s is back", self.name)
                return process
        raise AssertionError("unreachable")

    # -- requests ------------------------------------------------------------------------------

    def submit(self, request: TurnRequest, on_event: OnEvent) -> list[int]:
        """Begin a turn for each choice: `on_event` gets the events of each, up to its last."""
        process = self._ready_process()
        if process.unsent_bytes > MOST_UNSENT_BYTES:
            raise Unavailable(f"model {self.name} is behind with reading requests; try again later")
        displaced = self._turns.displaced_by(request.salt, len(request.turns))
        request = structs.replace(request.numbered(self._ids), request_id=current_id())
        process.send(request)
        for choice, turn in enumerate(request.turns):
            # Not before: a turn that was never sent has no end.
            self._turns.add(turn, request.salt, partial(on_event, choice))
        for turn in displaced:
            self._displace(turn, process)
        return request.turns

    def _displace(self, turn: int, process: RuntimeProcess) -> None:
        """Refuse a turn after all: others have come, and its tenant has more than its share."""
        listener = self._turns.give_up(turn)
        assert listener is not None, "somebody waits for it"
        process.send(Cancel(turn))
        refusal = TooManyRequests("other clients need the place of this request; try again later")
        listener(Failed(turn, refusal.info))

    def cancel(self, turn: int) -> None:
        """Give the turn up, unless it has ended; none of its events is delivered any more."""
        if self._turns.give_up(turn) and self.ready is not None:
            self._ready_process().send(Cancel(turn))

    async def stream(self, request: TurnRequest) -> AsyncGenerator[Event, None]:
        """Events of one turn, up to its terminal one; closing the generator cancels the turn."""
        events: asyncio.Queue[Event] = asyncio.Queue()
        [turn] = self.submit(request, lambda _choice, event: events.put_nowait(event))
        try:
            ended = False
            while not ended:
                event = await events.get()
                ended = isinstance(event, TERMINAL)
                yield event
        finally:
            self.cancel(turn)

    async def admin(self, op: AdminOp, *, salt: bytes, admin: bool = False) -> AdminResult:
        """Look at the cache or change it; an error that comes back is raised."""
        process = self._ready_process()
        if sum(call.salt == salt for call in self._admin_requests.values()) >= MOST_ADMIN_REQUESTS:
            raise TooManyRequests(
                f"{MOST_ADMIN_REQUESTS} requests about cache or tokens were not answered yet; "
                "try again later"
            )
        number = next(self._ids)
        process.send(
            AdminRequest(id=number, salt=salt, admin=admin, op=op, request_id=current_id())
        )
        result: asyncio.Future[AdminResult] = asyncio.get_running_loop().create_future()
        self._admin_requests[number] = _AdminCall(salt, result)
        return await result

    def _ready_process(self) -> RuntimeProcess:
        if self.ready is None or self._process is None:
            raise self._still_loading()
        return self._process

    def _still_loading(self) -> Unavailable:
        return Unavailable(f"model {self.name} is loading; try again in a moment")

    # -- what comes back -----------------------------------------------------------------------

    def _receive(self, message: AfterLoading) -> None:
        match message:
            case Heartbeat(working_s):
                self._watchdog.hear(working_s)
            case Events(events):
                for event in events:
                    self._turns.deliver(event)
            case AdminReply():
                self._resolve(message)
            case LogLine(level, text, request_id):
                level_number = logging.getLevelNamesMapping()[level.upper()]
                log.log(level_number, "%s", text, extra={"request_id": request_id})

    def _resolve(self, reply: AdminReply) -> None:
        call = self._admin_requests.pop(reply.id, None)
        if call is None or call.result.done():
            return  # whoever asked does not wait any more
        if reply.result is not None:
            call.result.set_result(reply.result)
        else:
            assert reply.error is not None, "a reply has a result or an error"
            call.result.set_exception(ReportedError(reply.error))

    def _fail_all(self, error: ServerError) -> None:
        for turn in self._turns.ids():
            self._turns.deliver(Failed(turn, error.info))
        calls, self._admin_requests = self._admin_requests, {}
        for call in calls.values():
            if not call.result.done():
                call.result.set_exception(error)
