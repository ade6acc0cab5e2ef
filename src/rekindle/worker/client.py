"""Sends requests to one model's runtime process, and delivers the events that come back."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from msgspec import structs

from rekindle.errors import ReportedError, ServerError, TooManyRequests, Unavailable
from rekindle.http.limits import Account, current_account
from rekindle.http.logs import current_id
from rekindle.protocol.admin import AdminOp, AdminReply, AdminRequest, AdminResult
from rekindle.protocol.events import (
    TERMINAL,
    Delta,
    Event,
    Failed,
    Finished,
    Started,
)
from rekindle.protocol.frames import Events, Heartbeat, LogLine, Ready, TurnRequest
from rekindle.protocol.requests import Cancel, LoadModel
from rekindle.worker.activity import Activity, TurnWatch
from rekindle.worker.supervisor import AfterLoading, OnLoading, Supervisor, WorkerProcess

log = logging.getLogger("rekindle.runtime")

MAX_UNSENT_BYTES = 128 << 20  # requests that the runtime process has not read yet
MAX_ADMIN_REQUESTS = 64  # unanswered requests per tenant

Handler = Callable[[Event], None]
OnEvent = Callable[[int, Event], None]  # also takes the index of the choice


class RuntimeClient:
    """One model in its own process. A crash fails the turns in flight, but never the server."""

    def __init__(
        self, name: str, load: LoadModel, *, queue: int, step_timeout_s: float = 300.0
    ) -> None:
        self.name = name
        self._load = load
        self.activity = Activity()
        self._turns = OpenTurns(load.settings.parallel + queue, self.activity)
        self._admin_requests: dict[int, tuple[bytes, asyncio.Future[AdminResult]]] = {}
        self._ids = itertools.count(1)
        self.heartbeat = Heartbeat(0.0)  # the last one
        self.supervisor = Supervisor(
            name, load, self._receive, self._fail_all, step_timeout_s=step_timeout_s
        )

    @property
    def ready(self) -> Ready | None:
        """The description of the model, or None while it is not loaded."""
        return self.supervisor.ready

    @property
    def loaded(self) -> Ready:
        """The description of the model. Raises Unavailable while it is not loaded."""
        if self.ready is None:
            raise self._still_loading()
        return self.ready

    @property
    def described(self) -> Ready | None:
        """The description of the model when it was last loaded. None: it was never loaded."""
        return self.ready or self.supervisor.described

    @property
    def file_name(self) -> str:
        """Name of the model's file or folder. Its path would show clients the operator's disk."""
        return Path(self._load.path).name

    @property
    def path(self) -> Path:
        return Path(self._load.path)

    @property
    def file(self) -> ModelFile:
        return ModelFile.at(self.path)

    @property
    def turns(self) -> int:
        return len(self._turns)

    @property
    def running_turns(self) -> int:
        """The turns whose prefill has begun. The others wait."""
        return self._turns.running

    @property
    def is_busy(self) -> bool:
        """Whether a turn or a request about the cache has not ended."""
        return bool(self._turns or self._admin_requests)

    async def start(
        self, on_loading: OnLoading = lambda _fraction: None, load: LoadModel | None = None
    ) -> None:
        """Load the model, by default from the same files as before. Raises ModelError."""
        self._load = load or self._load
        await self.supervisor.start(self._load, on_loading)

    async def stop(self, reason: str = "the server is stopping") -> None:
        """Stop the process, which writes its state to disk. Turns in flight fail."""
        self.supervisor.disable()
        self._fail_all(Unavailable(reason))
        await self.supervisor.stop()

    def submit(self, request: TurnRequest, on_event: OnEvent) -> list[int]:
        """Start one turn per choice. `on_event` receives the events of each, up to its last."""
        process = self._ready_process()
        if process.unsent_bytes > MAX_UNSENT_BYTES:
            raise Unavailable(f"model {self.name} is behind with reading requests; try again later")
        displaced = self._turns.displaced_by(request.salt, len(request.turns))
        request = structs.replace(request.with_turn_ids(self._ids), request_id=current_id())
        account = current_account()
        if account is not None:
            account.check_turns(len(request.turns))
        process.send(request)
        for choice, turn in enumerate(request.turns):  # after sending, which may raise
            self._turns.add(turn, request.salt, partial(on_event, choice), account)
        for turn in displaced:
            process.send(Cancel(turn))
            self._turns.displace(turn)
        return request.turns

    def cancel(self, turn: int) -> None:
        """Cancel the turn, unless it has ended. None of its later events is delivered."""
        if self._turns.abandon(turn) and self.ready is not None:
            self._ready_process().send(Cancel(turn))

    def cancel_tenant(self, tenant: bytes) -> None:
        """End all turns of a tenant with an error."""
        for turn in self._turns.of(tenant):
            if self.ready is not None:
                self._ready_process().send(Cancel(turn))
            self._turns.fail(turn, Unavailable("the operator has ended the turns of this API key"))

    async def stream(self, request: TurnRequest) -> AsyncGenerator[Event, None]:
        """Yield the events of one turn. Closing the generator cancels the turn."""
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

    async def admin(
        self, op: AdminOp, *, salt: bytes, admin: bool = False, groups: Sequence[str] = ()
    ) -> AdminResult:
        """Inspect or change the cache. Raises the error that the runtime reports."""
        process = self._ready_process()
        # A caller that stops waiting still counts until the reply arrives.
        if sum(salt == tenant for tenant, _ in self._admin_requests.values()) >= MAX_ADMIN_REQUESTS:
            raise TooManyRequests(
                f"{MAX_ADMIN_REQUESTS} requests about cache or tokens are not answered yet; "
                "try again later"
            )
        request = AdminRequest(
            id=next(self._ids),
            salt=salt,
            groups=list(groups),
            admin=admin,
            op=op,
            request_id=current_id(),
        )
        process.send(request)
        result: asyncio.Future[AdminResult] = asyncio.get_running_loop().create_future()
        self._admin_requests[request.id] = (salt, result)
        return await result

    def _ready_process(self) -> WorkerProcess:
        process = self.supervisor.process
        if self.ready is None or process is None:
            raise self._still_loading()
        return process

    def _still_loading(self) -> Unavailable:
        return Unavailable(f"model {self.name} is loading; try again in a moment")

    def _receive(self, message: AfterLoading) -> None:
        match message:
            case Events(events):
                for event in events:
                    self._turns.deliver(event)
            case Heartbeat():
                self.supervisor.watchdog.heartbeat(message.working_s)
                self.heartbeat = message
            case AdminReply():
                self._resolve(message)
            case LogLine(level, text, request_id):
                level_number = logging.getLevelNamesMapping()[level.upper()]
                log.log(level_number, "%s", text, extra={"request_id": request_id})

    def _resolve(self, reply: AdminReply) -> None:
        _, result = self._admin_requests.pop(reply.id, (b"", None))
        if result is None or result.done():
            return  # the caller stopped waiting
        if reply.result is not None:
            result.set_result(reply.result)
        else:
            assert reply.error is not None, "a reply has a result or an error"
            result.set_exception(ReportedError(reply.error))

    def _fail_all(self, error: ServerError) -> None:
        for turn in self._turns.ids():
            self._turns.deliver(Failed(turn, error.info))
        requests, self._admin_requests = self._admin_requests, {}
        for _, result in requests.values():
            if not result.done():
                result.set_exception(error)


@dataclass(slots=True)
class OpenTurn:
    tenant: bytes
    handler: Handler | None  # None if the client is gone and the runtime has not ended the turn yet
    watch: TurnWatch
    is_started: bool = False
    account: Account | None = None  # None: the server's own turn
    counted_tokens: int = 0  # of the reply, one for each part that was delivered

    def count(self, event: Event) -> None:
        """Count what the turn has used. A client that leaves early has used what it received."""
        if self.account is None:
            return
        match event:
            case Delta():
                self.counted_tokens += 1
                self.account.use_reply(1)
            case Started():
                self.account.use_prompt(event.prompt_tokens, event.reused_tokens)
            case Finished():
                self.account.use_reply(max(event.completion_tokens - self.counted_tokens, 0))

    def end(self) -> None:
        if self.account is not None:
            self.account.end_turn()

    @property
    def is_waiting(self) -> bool:
        return self.handler is not None and not self.is_started


class OpenTurns:
    """The turns that have not ended. Their number is limited.

    A single tenant may have all places. If all are taken when another tenant comes, tenants with
    more than their share lose turns that have not started. Fixed quotas were rejected, because they
    leave places empty while requests are refused.
    """

    def __init__(self, places: int, activity: Activity) -> None:
        self._places = places
        self._activity = activity
        self._turns: dict[int, OpenTurn] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._turns)

    @property
    def running(self) -> int:
        return sum(turn.is_started for turn in self._turns.values())

    def ids(self) -> list[int]:
        return list(self._turns)

    def displaced_by(self, tenant: bytes, count: int) -> list[int]:
        """Return the turns that have to go for `count` new ones. Raises TooManyRequests."""
        # An abandoned turn counts against its own tenant only, so disconnecting early neither wins
        # a place nor costs another tenant one.
        turns = self._turns.values()
        taken = sum(turn.handler is not None or turn.tenant == tenant for turn in turns)
        excess = taken + count - self._places
        if excess <= 0:
            return []
        held = Counter(turn.tenant for turn in turns)
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

    def add(
        self, number: int, tenant: bytes, handler: Handler, account: Account | None = None
    ) -> None:
        watch = self._activity.begin(number, tenant, current_id())
        self._turns[number] = OpenTurn(tenant, handler, watch, account=account)
        if account is not None:
            account.begin_turn()

    def deliver(self, event: Event) -> None:
        """Pass an event to its turn's handler. A terminal event ends the turn."""
        turn = self._turns.get(event.turn)
        if turn is None:
            return
        turn.count(event)
        if isinstance(event, Delta):
            watch = turn.watch
            watch.parts += 1
            if watch.first_part_s is None:
                watch.first_part_s = self._activity.clock()
        else:
            turn.is_started |= isinstance(event, Started)
            turn.watch.observe(event)
            if isinstance(event, TERMINAL):
                self._turns.pop(event.turn).end()
                self._activity.end(turn.watch, event)
        if turn.handler is not None:
            turn.handler(event)

    def abandon(self, number: int) -> Handler | None:
        """Deliver no more events of a turn. Returns its handler, or None if it has ended.

        A turn that has started frees its place immediately, any other when the runtime ends it.
        """
        turn = self._turns.get(number)
        if turn is None or turn.handler is None:
            return None
        handler, turn.handler = turn.handler, None
        self._activity.end(turn.watch, None)
        if turn.is_started:
            self._turns.pop(number).end()
        return handler

    def displace(self, number: int) -> None:
        """Refuse a waiting turn, because another tenant needs its place."""
        refusal = TooManyRequests("other clients need the place of this request; try again later")
        self.fail(number, refusal)

    def fail(self, number: int, error: ServerError) -> None:
        """End a turn for its client."""
        if handler := self.abandon(number):
            handler(Failed(number, error.info))

    def of(self, tenant: bytes) -> list[int]:
        return [number for number, turn in self._turns.items() if turn.tenant == tenant]


@dataclass(frozen=True, slots=True)
class ModelFile:
    """Facts about a model's file, or its folder of files."""

    format: str  # the suffix of the file, or of the largest file in the folder
    size_bytes: int
    modified_s: float

    @classmethod
    def at(cls, path: Path) -> ModelFile:
        """Return zeros if the file is gone. The loaded model continues to work."""
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
