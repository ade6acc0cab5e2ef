"""Requests of Anthropic's Messages to the application over a scripted runtime."""

from __future__ import annotations

from typing import Any

import httpx

from rekindle.protocol.requests import GenerateRequest
from tests.api.anthropic.stream_grammar import events_of, message_of
from tests.api.scripted import Front, Script, ScriptedRuntime

PATH = "/v1/messages"
HELLO: dict[str, Any] = {"max_tokens": 64, "messages": [{"role": "user", "content": "hello"}]}
TOOL: dict[str, Any] = {
    "name": "look",
    "description": "Look at something.",
    "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}},
}
LOOK: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look at something.",
        "parameters": TOOL["input_schema"],
    },
}


def ask(front: Front, **fields: Any) -> httpx.Response:
    return front.post(PATH, {**HELLO, **fields})


def whole(*script: Any, **fields: Any) -> dict[str, Any]:
    """A whole message."""
    response = ask(Front(_runtime(script)), **fields)
    assert response.status_code == httpx.codes.OK, response.text
    return dict(response.json())


def streamed(*script: Any, **fields: Any) -> dict[str, Any]:
    """A message put together from its stream, which is checked."""
    return message_of(events_of(ask(Front(_runtime(script)), stream=True, **fields)))


def requested(**fields: Any) -> GenerateRequest:
    """What the runtime is asked."""
    front = Front()
    response = ask(front, **fields)
    assert response.status_code == httpx.codes.OK, response.text
    return front.runtime.requested


def messages_sent(*messages: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    """What the runtime renders of these messages."""
    found = requested(messages=list(messages), **fields).messages
    assert found is not None
    return found


def refused(**fields: Any) -> str:
    """Why a request is wrong."""
    response = ask(Front(), **fields)
    assert response.status_code == httpx.codes.BAD_REQUEST, response.text
    return error(response)["message"]


def error(response: httpx.Response) -> dict[str, str]:
    """The error of an answer, its shape checked."""
    body = response.json()
    assert set(body) == {"type", "error", "request_id"}
    assert body["type"] == "error"
    assert set(body["error"]) == {"type", "message"}
    assert body["request_id"] == response.headers["x-request-id"]
    return dict(body["error"])


def _runtime(script: Script) -> ScriptedRuntime:
    return ScriptedRuntime(script) if script else ScriptedRuntime()
