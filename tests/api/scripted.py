"""A runtime that plays scripted events, behind the real application."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx
from msgspec import structs
from starlette.types import ASGIApp, Receive, Scope, Send

from rekindle.api.base.models import ServedModels
from rekindle.config import Config
from rekindle.errors import ReportedError, ServerError, Unavailable
from rekindle.front.app import build_app
from rekindle.http.middleware import Drain, RequestMiddleware
from rekindle.protocol.admin import AdminOp, AdminResult
from rekindle.protocol.events import (
    TERMINAL,
    ArgumentsDelta,
    CacheReport,
    Delta,
    ErrorInfo,
    Event,
    Failed,
    Finished,
    FinishReason,
    Reason,
    ReasoningDelta,
    Started,
    TextDelta,
    TokenLogprob,
    ToolCallStart,
)
from rekindle.protocol.frames import DISK, RAM, Capacity, Ready, TurnRequest
from rekindle.protocol.requests import EmbedRequest, GenerateRequest, LoadModel, RankRequest
from rekindle.protocol.settings import RuntimeSettings
from rekindle.worker.client import ModelFile, OnEvent, RuntimeClient

PATIENCE_S = 30.0
HELLO = {"messages": [{"role": "user", "content": "hello"}]}


class Pause:
    """A step that lasts until the turn is cancelled."""


Step = Event | ServerError | Pause
Script = Sequence[Step]

MISS = CacheReport("miss", Reason.NOT_CACHED, 0, 12, None)


def finished(
    reason: FinishReason = "stop",
    *,
    prompt_tokens: int = 10,
    completion_tokens: int = 2,
    cache: CacheReport = MISS,
    prompt_eval_s: float = 0.25,
    message_id: str | None = None,
    reasoning_tokens: int = 0,
) -> Finished:
    return Finished(
        0,
        reason,
        prompt_tokens,
        completion_tokens,
        prompt_eval_s,
        cache,
        message_id=message_id,
        reasoning_tokens=reasoning_tokens,
    )


def hit(reused_tokens: int, tier: str = "ram") -> CacheReport:
    return CacheReport("hit", Reason.FULL_MATCH, reused_tokens, 12, tier)


def delta(text: str, logprobs: list[TokenLogprob] | None = None) -> Delta:
    return Delta(0, TextDelta(text, logprobs))


def reasoning(text: str) -> Delta:
    return Delta(0, ReasoningDelta(text))


def failed(
    status: int, kind: str, code: str | None, message: str, param: str | None = None
) -> Failed:
    """The end of a turn that did not go well."""
    info = ErrorInfo(status=status, kind=kind, code=code, message=message, param=param)
    return Failed(0, info)


def reply(
    *texts: str, logs: Sequence[list[TokenLogprob]] | None = None, end: Step | None = None
) -> list[Step]:
    """A turn that begins, streams these texts and ends."""
    deltas = [delta(text, logs[i] if logs else None) for i, text in enumerate(texts)]
    return [Started(0, 10, 0), *deltas, end or finished(completion_tokens=len(texts))]


def calling(*calls: tuple[str, str], before: Sequence[Step] = ()) -> list[Step]:
    """A turn that calls functions, the arguments of each in pieces of five characters."""
    parts: list[Step] = []
    for index, (name, arguments) in enumerate(calls):
        parts.append(Delta(0, ToolCallStart(index, name, f"call_{index}")))
        pieces = [arguments[at : at + 5] for at in range(0, len(arguments), 5)]
        parts += [Delta(0, ArgumentsDelta(index, piece)) for piece in pieces]
    return [Started(0, 10, 0), *before, *parts, finished("tool_calls")]


@dataclass(frozen=True)
class Received:
    """An admin request as it reached the runtime."""

    op: AdminOp
    salt: bytes
    admin: bool


Answers = Callable[[AdminOp], AdminResult]


def reported(status: int, kind: str, code: str | None, message: str) -> ReportedError:
    """An error as a runtime reports it."""
    return ReportedError(ErrorInfo(status=status, kind=kind, code=code, message=message))


def unknown_key() -> ReportedError:
    return reported(404, "invalid_request_error", "cache_key_not_found", "unknown")


def refuse(_op: AdminOp) -> AdminResult:
    """A runtime that knows no key."""
    raise unknown_key()


CAPACITIES = (Capacity(RAM, 10_000, 2_000_000_000), Capacity(DISK, 50_000, 10_000_000_000))


class ScriptedRuntime(RuntimeClient):
    """Answers the nth turn with the nth script; the last script goes on for ever.

    Admin requests are recorded and left to `answers`.
    """

    def __init__(
        self, *scripts: Script, name: str = "tiny", answers: Answers = refuse, sees: bool = False
    ) -> None:
        super().__init__(
            name, LoadModel(path=f"/models/{name}.gguf", settings=RuntimeSettings()), queue=0
        )
        self.supervisor.ready = Ready(
            context_tokens=4096,
            pool_tokens=8192,
            chat_template="{{ x }}",
            capacities=CAPACITIES,
            has_state_files=True,
            modalities=("image", "text") if sees else ("text",),
        )
        self.frames: list[GenerateRequest] = []  # as they are sent
        self.requests: list[GenerateRequest] = []  # of those, each choice's own
        self.asked: list[EmbedRequest | RankRequest] = []
        self.admin_requests: list[Received] = []
        self.open_turns = 0
        self.cancelled_turns = 0
        self.scripts: list[asyncio.Task[None]] = []
        self._playing: dict[int, asyncio.Task[None]] = {}
        self._scripts = scripts or (reply("Hel", "lo"),)
        self._answers = answers

    @property
    def file(self) -> ModelFile:
        return ModelFile("gguf", 7, 1.0)

    def submit(self, request: TurnRequest, on_event: OnEvent) -> list[int]:
        if not isinstance(request, GenerateRequest):
            self.asked.append(request)
            return [self._start(len(self.asked), partial(on_event, 0))]
        self.frames.append(request)
        return [
            self._begin(each, partial(on_event, choice))
            for choice, each in enumerate(request.choices())
        ]

    def _begin(self, request: GenerateRequest, on_event: Callable[[Event], None]) -> int:
        self.requests.append(structs.replace(request, received_s=None))
        return self._start(len(self.requests), on_event)

    def _start(self, turn: int, on_event: Callable[[Event], None]) -> int:
        script = self._scripts[min(turn, len(self._scripts)) - 1]
        if isinstance(script[0], ServerError):
            raise script[0]
        self.open_turns += 1
        playing = self._playing[turn] = asyncio.create_task(self._play(turn, script, on_event))
        self.scripts.append(playing)
        return turn

    def cancel(self, turn: int) -> None:
        if playing := self._playing.pop(turn, None):
            playing.cancel()
            self.open_turns -= 1
            self.cancelled_turns += 1

    async def admin(
        self, op: AdminOp, *, salt: bytes, admin: bool = False, groups: object = ()
    ) -> AdminResult:
        if self.ready is None:
            raise Unavailable(f"model {self.name} is loading")
        self.admin_requests.append(Received(op, salt, admin))
        await asyncio.sleep(0)
        return self._answers(op)

    async def paused(self) -> None:
        """Lasts as long as a pause does."""
        await asyncio.Event().wait()

    async def _play(self, turn: int, script: Script, on_event: Callable[[Event], None]) -> None:
        for step in script:
            if isinstance(step, Pause):
                await self.paused()
            elif isinstance(step, TERMINAL):
                del self._playing[turn]
                self.open_turns -= 1
                on_event(step)
                return
            else:
                assert not isinstance(step, ServerError), "a refusal comes first"
                on_event(step)
            await asyncio.sleep(0)

    @property
    def requested(self) -> GenerateRequest:
        [only] = self.requests
        return only

    @property
    def admin_request(self) -> Received:
        [only] = self.admin_requests
        return only


@asynccontextmanager
async def lifespan(app: ASGIApp) -> AsyncIterator[ASGIApp]:
    """The application as a server runs it: started, with its state in every scope, shut down."""
    state: dict[str, Any] = {}
    incoming: asyncio.Queue[Any] = asyncio.Queue()
    outgoing: asyncio.Queue[Any] = asyncio.Queue()
    scope = {"type": "lifespan", "asgi": {"version": "3.0"}, "state": state}
    life = asyncio.create_task(_call(app, scope, incoming.get, outgoing.put))
    await incoming.put({"type": "lifespan.startup"})
    assert (await outgoing.get())["type"] == "lifespan.startup.complete"

    async def started(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, "state": dict(state)}, receive, send)

    yield started
    await incoming.put({"type": "lifespan.shutdown"})
    assert (await outgoing.get())["type"] == "lifespan.shutdown.complete"
    await life


async def _call(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    await app(scope, receive, send)


class Front:
    """The real application over scripted runtimes. Every request is checked for leaks."""

    def __init__(
        self,
        *runtimes: ScriptedRuntime,
        embedders: Sequence[ScriptedRuntime] = (),
        **settings: Any,
    ) -> None:
        self.runtimes = list(runtimes) or [ScriptedRuntime()]
        self.embedders = list(embedders)
        self.runtime = self.runtimes[0]
        self.config = Config(**settings)

    def app(self, drain: Drain | None = None) -> RequestMiddleware:
        models = ServedModels(self.config, [*self.runtimes], self.embedders)
        return build_app(self.config, models, drain=drain)

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        return asyncio.run(self._request(method, path, options))

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.request("GET", path, **options)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.request("POST", path, json=body, **options)

    def chat(self, *, headers: Any = None, **fields: Any) -> httpx.Response:
        return self.post("/v1/chat/completions", {**HELLO, **fields}, headers=headers)

    def complete(self, *, headers: Any = None, **fields: Any) -> httpx.Response:
        return self.post("/v1/completions", {"prompt": "hello", **fields}, headers=headers)

    async def _request(self, method: str, path: str, options: dict[str, Any]) -> httpx.Response:
        async with lifespan(self.app()) as app:
            before = asyncio.all_tasks()
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            client = httpx.AsyncClient(transport=transport, base_url="http://localhost")
            async with asyncio.timeout(PATIENCE_S), client as http:
                response = await http.request(method, path, **options)
            runtimes = [*self.runtimes, *self.embedders]
            scripts = {task for runtime in runtimes for task in runtime.scripts}
            assert asyncio.all_tasks() - scripts == before, "a request left tasks behind"
        assert all(runtime.open_turns == 0 for runtime in runtimes)
        return response


@dataclass(frozen=True)
class ServerEvent:
    name: str | None
    data: str

    @property
    def json(self) -> dict[str, Any]:
        return dict(json.loads(self.data))


def events(text: str) -> list[ServerEvent]:
    """A stream's events, parsed strictly."""
    found = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        *named, data = block.split("\n")
        name = named[0].removeprefix("event: ") if named else None
        assert data.startswith("data: ")
        assert len(named) <= 1
        found.append(ServerEvent(name, data.removeprefix("data: ")))
    return found


def chunks(response: httpx.Response) -> list[dict[str, Any]]:
    """The chunks of a stream that ended well."""
    assert response.status_code == httpx.codes.OK, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *parts, done = events(response.text)
    assert done.data == "[DONE]"
    return [part.json for part in parts]


def error(response: httpx.Response) -> dict[str, Any]:
    """The error of a refusal, its shape checked."""
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) - {"n_prompt_tokens", "n_ctx"} == {"message", "type", "param", "code"}
    assert response.headers["content-type"] == "application/json"
    return dict(body["error"])
