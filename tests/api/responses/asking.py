"""Requests of the Responses API to the application over a scripted runtime with documents."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rekindle.protocol.admin import (
    AdminOp,
    AdminResult,
    DeleteEntry,
    Document,
    DocumentKeys,
    DocumentStored,
    GetDocument,
    ListDocuments,
    Removed,
    StoreDocument,
    Tokenize,
    Tokenized,
)
from rekindle.protocol.requests import GenerateRequest
from tests.api.responses.stream_grammar import events_of, response_of
from tests.api.scripted import (
    PATIENCE_S,
    Front,
    Script,
    ScriptedRuntime,
    error,
    lifespan,
    unknown_key,
)

PATH = "/v1/responses"
HELLO: dict[str, Any] = {"input": "hello"}
TOOL: dict[str, Any] = {
    "type": "function",
    "name": "look",
    "description": "Look at something.",
    "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
}
LOOK: dict[str, Any] = {
    "type": "function",
    "function": {key: TOOL[key] for key in ("name", "description", "parameters")},
}


class Documents:
    """Keeps documents as a runtime does, for one tenant."""

    def __init__(self, *, has_room: bool = True, durable: bool = True) -> None:
        self.kept: dict[str, bytes] = {}
        self._has_room = has_room
        self._durable = durable

    def answer(self, op: AdminOp) -> AdminResult:
        match op:
            case StoreDocument(key=key, content=content):
                if self._has_room:
                    self.kept[key] = content
                return DocumentStored(self._has_room, self._durable)
            case GetDocument(key) if key in self.kept:
                return Document(key, self.kept[key])
            case ListDocuments(prefix):
                keys = [key for key in self.kept if key.startswith(prefix)]
                return DocumentKeys(keys, [float(number) for number in range(len(keys))])
            case DeleteEntry(key) if key in self.kept:
                del self.kept[key]
                return Removed(1, 0, self._durable)
            case Tokenize():
                return Tokenized(len(op.messages or ()) + 40, 4096)
        raise unknown_key()


class StoppedRuntime(ScriptedRuntime):
    """Answers turns, but never says that it has stored a document."""

    async def admin(
        self, op: AdminOp, *, salt: bytes, admin: bool = False, groups: object = ()
    ) -> AdminResult:
        if isinstance(op, StoreDocument):
            await asyncio.Event().wait()
        return await super().admin(op, salt=salt, admin=admin)


class Stepwise(ScriptedRuntime):
    """Pauses until it is told to continue."""

    def __init__(self, *scripts: Script) -> None:
        super().__init__(*scripts, answers=Documents().answer)
        self.may_continue = asyncio.Event()

    async def paused(self) -> None:
        await self.may_continue.wait()


def runtime_of(*scripts: Script, **options: Any) -> ScriptedRuntime:
    return ScriptedRuntime(*scripts, answers=Documents().answer, **options)


def front_of(*scripts: Script, **settings: Any) -> Front:
    return Front(runtime_of(*scripts), **settings)


def ask(front: Front, **fields: Any) -> httpx.Response:
    return front.post(PATH, {**HELLO, **fields})


Act = Callable[[httpx.AsyncClient, str], Awaitable[httpx.Response]]


def interrupted(front: Front, at: str, act: Act) -> tuple[httpx.Response, list[httpx.Response]]:
    """Return a stream, and the answers to other requests, which `act` sends with the response's
    path after each chunk that has such an event and before the next chunk."""
    return asyncio.run(_interrupted(front, at, act))


async def _interrupted(
    front: Front, at: str, act: Act
) -> tuple[httpx.Response, list[httpx.Response]]:
    answers, path = list[httpx.Response](), ""
    async with lifespan(front.app()) as app:

        async def watched(scope: Scope, receive: Receive, send: Send) -> None:
            async def sent(message: Message) -> None:
                nonlocal path
                await send(message)
                body = bytes(message.get("body", b""))
                if found := re.search(rb'"id":"(resp_[0-9a-f]+)"', body):
                    path = f"{PATH}/{found[1].decode()}"
                if f"event: {at}\n".encode() in body:
                    answers.append(await act(_client(app), path))

            await app(scope, receive, sent)

        async with asyncio.timeout(PATIENCE_S), _client(watched) as http:
            streamed = await http.post(PATH, json={**HELLO, "stream": True})
    return streamed, answers


def _client(app: ASGIApp) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost")


def answered(front: Front, **fields: Any) -> dict[str, Any]:
    """A response, whole or put together from its stream, which is checked."""
    response = ask(front, **fields)
    assert response.status_code == httpx.codes.OK, response.text
    return response_of(events_of(response)) if fields.get("stream") else dict(response.json())


def both(*script: Any, **fields: Any) -> dict[str, Any]:
    """A response that is the same whole and streamed, but for its ids and times."""
    [one, other] = (answered(front_of(script), **fields, stream=stream) for stream in (False, True))
    for each in (one, other):
        number = each["id"].removeprefix("resp_")
        for item in each["output"]:
            assert item.pop("id").partition("_")[2].startswith(number)
        for field in ("id", "created_at", "completed_at"):
            each.pop(field, None)
    assert one == other
    return one


def requested(**fields: Any) -> GenerateRequest:
    """What the runtime is asked."""
    front = front_of()
    answered(front, **fields)
    return front.runtime.requested


def messages_sent(*items: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    """What the runtime renders of these items."""
    found = requested(input=list(items), **fields).messages
    assert found is not None
    return found


def refused(**fields: Any) -> str:
    """Why a request is wrong."""
    response = ask(front_of(), **fields)
    assert response.status_code == httpx.codes.BAD_REQUEST, response.text
    return str(error(response)["message"])
