"""The front's side of a model: its turns and its admin requests."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from msgspec import structs

from rekindle.errors import ReportedError, ServerError, TooManyRequests, Unavailable
from rekindle.http.logs import current_id
from rekindle.protocol.admin import AdminOp, AdminReply, AdminRequest, AdminResult
from rekindle.protocol.events import TERMINAL, Delta, Event, Failed, Started
from rekindle.protocol.frames import Events, Heartbeat, LogLine, Ready, TurnRequest
from rekindle.protocol.requests import Cancel, LoadModel
from rekindle.worker.process import AfterLoading, OnLoading, WorkerProcess
from rekindle.worker.supervisor import Supervisor

# ----------------------------------------------------------------------
# Turns that a runtime has not ended: whose they are, who listens, and who may begin another.

Listener = Callable[[Event], None]


@dataclass(slots=True)
class OpenTurn:
    tenant: bytes
    listener: Listener | None  # None: it was given up, and the runtime has not let go of it yet
    is_started: bool = False

    @property
    def is_waiting(self) -> bool:
        return self.listener is not None and not self.is_started


class OpenTurns:
    """A bounded number of places. A tenant alone may have them all; when others come and all are
    taken, room is made by the tenants that have more than their share, out of what has not begun.
    (Fixed quotas were rejected: they leave places empty while somebody is refused.)"""

    def __init__(self, places: int) -> None:
        self._places = places
        self._turns: dict[int, OpenTurn] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._turns)

    def ids(self) -> list[int]:
        return list(self._turns)

    def displaced_by(self, tenant: bytes, count: int) -> list[int]:
        """The turns that make room for so many more of a tenant; raises TooManyRequests."""
        excess = self._taken_for(tenant) + count - self._places
        if excess <= 0:
            return []
        held = Counter(turn.tenant for turn in self._turns.values())
        share = max(self._places // len({*held, tenant}), 1)
        displaced: list[int] = []
        if held[tenant] + count <= share:
            for number, turn in reversed(self._turns.items()):
                if len(displaced) < excess and turn.is_waiting and held[turn.tenant] > share:
                    held[turn.tenant] -= 1
                    displaced.append(number)
        if len(displaced) < excess:
            raise TooManyRequests(
                f"{len(self._turns)} requests are already queued or running; try again later"
            )
        return displaced

    def _taken_for(self, tenant: bytes) -> int:
        """Places that are taken when a tenant asks for one: what was given up counts against those
        who gave it up alone, so hanging up early wins nobody a place and costs nobody else one."""
        turns = self._turns.values()
        return sum(turn.listener is not None or turn.tenant == tenant for turn in turns)

    def add(self, number: int, tenant: bytes, listener: Listener) -> None:
        self._turns[number] = OpenTurn(tenant, listener)

    def deliver(self, event: Event) -> None:
        """Hand an event to whoever listens; a terminal one ends the turn."""
        turn = self._turns.get(event.turn)
        if turn is None:
            return
        if not isinstance(event, Delta):
            turn.is_started |= isinstance(event, Started)
            if isinstance(event, TERMINAL):
                del self._turns[event.turn]
        if turn.listener is not None:
            turn.listener(event)

    def give_up(self, number: int) -> Listener | None:
        """Deliver no more of a turn; returns who listened, None when it is over already. One that
        has begun gives its place back at once; any other when the runtime has let go of it."""
        turn = self._turns.get(number)
        if turn is None or turn.listener is None:
            return None
        listener, turn.listener = turn.listener, None
        if turn.is_started:
            del self._turns[number]
        return listener

    def displace(self, number: int) -> None:
        """Refuse a turn after all: others have come, and its tenant has more than its share."""
        listener = self.give_up(number)
        assert listener is not None, "somebody waits for it"
        refusal = TooManyRequests("other clients need the place of this request; try again later")
        listener(Failed(number, refusal.info))


# ----------------------------------------------------------------------
# Admin requests that a runtime has not answered: whose they are, and who waits.

MOST_OPEN = 64  # of one tenant at a time


class _Open(NamedTuple):
    tenant: bytes
    result: asyncio.Future[AdminResult]


class OpenAdminRequests:
    """A tenant may wait for a bounded number of answers."""

    def __init__(self) -> None:
        self._requests: dict[int, _Open] = {}

    def check_room(self, tenant: bytes) -> None:
        """Raises TooManyRequests."""
        if sum(each.tenant == tenant for each in self._requests.values()) >= MOST_OPEN:
            raise TooManyRequests(
                f"{MOST_OPEN} requests about cache or tokens were not answered yet; try again later"
            )

    def add(self, number: int, tenant: bytes) -> asyncio.Future[AdminResult]:
        """What a request that was sent will be answered with."""
        result: asyncio.Future[AdminResult] = asyncio.get_running_loop().create_future()
        self._requests[number] = _Open(tenant, result)
        return result

    def resolve(self, reply: AdminReply) -> None:
        request = self._requests.pop(reply.id, None)
        if request is None or request.result.done():
            return  # whoever asked does not wait any more
        if reply.result is not None:
            request.result.set_result(reply.result)
        else:
            assert reply.error is not None, "a reply has a result or an error"
            request.result.set_exception(ReportedError(reply.error))

    def fail_all(self, error: ServerError) -> None:
        requests, self._requests = self._requests, {}
        for request in requests.values():
            if not request.result.done():
                request.result.set_exception(error)


# ----------------------------------------------------------------------
# What a model's file, or its folder of files, tells from outside.


@dataclass(frozen=True, slots=True)
class ModelFile:
    format: str  # its suffix; of a folder, that of its weights
    size_bytes: int
    modified_s: float

    @classmethod
    def at(cls, path: Path) -> ModelFile:
        """Zeros for what is gone: the model was loaded, and goes on."""
        files = [each for each in path.iterdir() if each.is_file()] if path.is_dir() else [path]
        try:
            found = [(each.stat(), each.suffix) for each in files]
        except OSError:
            found = []
        largest = max(found, key=lambda each: each[0].st_size, default=None)
        return cls(
            format=(largest[1] if largest else path.suffix).lstrip("."),
            size_bytes=sum(each.st_size for each, _ in found),
            modified_s=max((each.st_mtime for each, _ in found), default=0.0),
        )


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
        request = structs.replace(request.with_turn_ids(self._ids), request_id=current_id())
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

    def _ready_process(self) -> WorkerProcess:
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
