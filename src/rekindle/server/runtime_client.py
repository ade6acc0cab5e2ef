"""The front's side of a model: its turns and its admin requests."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, Callable
from functools import partial
from pathlib import Path

from msgspec import structs

from rekindle.errors import ServerError, Unavailable
from rekindle.protocol.admin import AdminOp, AdminReply, AdminRequest, AdminResult
from rekindle.protocol.events import TERMINAL, Event, Failed
from rekindle.protocol.frames import Events, Heartbeat, LogLine, Ready, TurnRequest
from rekindle.protocol.requests import Cancel, LoadModel
from rekindle.server.model_file import ModelFile
from rekindle.server.open_admin_requests import OpenAdminRequests
from rekindle.server.open_turns import OpenTurns
from rekindle.server.request_id import current_id
from rekindle.server.runtime_process import AfterLoading, OnLoading, RuntimeProcess
from rekindle.server.supervisor import Supervisor

log = logging.getLogger("rekindle.runtime")

MOST_UNSENT_BYTES = 128 << 20  # that a runtime is behind with reading

OnEvent = Callable[[int, Event], None]  # with the choice's number in its request, from 0


class RuntimeClient:
    """One model in a process of its own. A crash fails the turns in flight, never the server."""

    def __init__(
        self, name: str, load: LoadModel, *, queue: int, step_timeout_s: float = 300.0
    ) -> None:
        self.name = name
        self._load = load
        self._turns = OpenTurns(load.settings.parallel + queue)
        self._admin_requests = OpenAdminRequests()
        self._ids = itertools.count(1)
        self.supervisor = Supervisor(
            name, load, self._receive, self._fail_all, step_timeout_s=step_timeout_s
        )

    @property
    def ready(self) -> Ready | None:
        """What the model is like; None: it is not loaded."""
        return self.supervisor.ready

    @property
    def loaded(self) -> Ready:
        """What the model is like; raises Unavailable while it is not loaded."""
        if self.ready is None:
            raise self._still_loading()
        return self.ready

    @property
    def file(self) -> ModelFile:
        return ModelFile.at(Path(self._load.path))

    @property
    def turns(self) -> int:
        return len(self._turns)

    async def start(self, on_loading: OnLoading = lambda _fraction: None) -> None:
        """Load the model; raises ModelError when it cannot be loaded."""
        await self.supervisor.start(on_loading)

    async def stop(self) -> None:
        """End the process; turns in flight fail."""
        self.supervisor.give_up()
        self._fail_all(Unavailable("the server is stopping"))
        await self.supervisor.stop()

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
            process.send(Cancel(turn))
            self._turns.displace(turn)
        return request.turns

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
        self._admin_requests.check_room(salt)
        number = next(self._ids)
        process.send(
            AdminRequest(id=number, salt=salt, admin=admin, op=op, request_id=current_id())
        )
        return await self._admin_requests.add(number, salt)

    def _ready_process(self) -> RuntimeProcess:
        process = self.supervisor.process
        if self.ready is None or process is None:
            raise self._still_loading()
        return process

    def _still_loading(self) -> Unavailable:
        return Unavailable(f"model {self.name} is loading; try again in a moment")

    # -- what comes back -----------------------------------------------------------------------

    def _receive(self, message: AfterLoading) -> None:
        match message:
            case Events(events):
                for event in events:
                    self._turns.deliver(event)
            case Heartbeat(working_s):
                self.supervisor.watchdog.hear(working_s)
            case AdminReply():
                self._admin_requests.resolve(message)
            case LogLine(level, text, request_id):
                level_number = logging.getLevelNamesMapping()[level.upper()]
                log.log(level_number, "%s", text, extra={"request_id": request_id})

    def _fail_all(self, error: ServerError) -> None:
        for turn in self._turns.ids():
            self._turns.deliver(Failed(turn, error.info))
        self._admin_requests.fail_all(error)
