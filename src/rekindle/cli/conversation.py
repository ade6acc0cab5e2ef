"""A conversation with a server: its messages, and each reply in parts as it comes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import httpx
import orjson

from rekindle.errors import RekindleError
from rekindle.event_stream import EventReader, EventTooLarge


class ChatFailed(RekindleError):
    """The server could not be reached or refused."""


class PrefillProgress(NamedTuple):
    """How much of the prompt has been computed."""

    done_tokens: int
    prompt_tokens: int


class Reasoning(NamedTuple):
    """Text that the model wrote for itself."""

    text: str


class ToolCall(NamedTuple):
    """A function that the model calls, or more of its arguments; it is shown and not run."""

    name: str
    arguments: str


@dataclass(slots=True)
class Cost:
    """What one turn took."""

    first_token_s: float | None = None
    usage: dict[str, Any] = field(default_factory=dict)

    def line(self) -> str:
        cached = _object(self.usage.get("prompt_tokens_details")).get("cached_tokens", 0)
        prompt = self.usage.get("prompt_tokens", 0)
        first = f"{self.first_token_s:.2f} s" if self.first_token_s is not None else "no token"
        return (
            f"reused {cached} of {prompt} prompt tokens, "
            f"first token after {first}, {self.usage.get('completion_tokens', 0)} generated"
        )


Part = str | Reasoning | ToolCall | PrefillProgress | Cost


@dataclass(slots=True)
class Conversation:
    """The messages so far and the server they go to."""

    base_url: str
    model: str
    api_key: str
    options: dict[str, Any]
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)
    transport: httpx.BaseTransport | None = None

    def __post_init__(self) -> None:
        self.start_over()

    def start_over(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def send(self, text: str) -> Iterator[Part]:
        """The reply as it comes, then its cost; a failed turn leaves the history unchanged."""
        messages = [*self.messages, {"role": "user", "content": text}]
        reply = ""
        cost = Cost()
        started = time.perf_counter()
        for chunk in self._chunks(messages):
            cost.usage = _object(chunk.get("usage")) or cost.usage
            for part in _parts(chunk):
                if cost.first_token_s is None and not isinstance(part, PrefillProgress):
                    cost.first_token_s = time.perf_counter() - started
                if isinstance(part, str):  # reasoning is not sent back
                    reply += part
                yield part
        self.messages = [*messages, {"role": "assistant", "content": reply}]
        yield cost

    def _chunks(self, messages: list[dict[str, str]]) -> Iterator[dict[str, Any]]:
        body = {
            "model": self.model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            "prefill_progress": True,
            **self.options,
        }
        headers = {"Authorization": f"Bearer {self.api_key}"}
        url = f"{self.base_url.rstrip('/')}/chat/completions"
        try:
            with (
                httpx.Client(timeout=None, transport=self.transport) as client,
                client.stream("POST", url, json=body, headers=headers) as response,
            ):
                if response.status_code != httpx.codes.OK:
                    response.read()
                    raise ChatFailed(_message(response))
                yield from _parse(response.iter_bytes())
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ChatFailed(
                f"cannot talk to {self.base_url} ({error}); is a server running? "
                "start one with `rekindle serve`"
            ) from None
        except EventTooLarge as error:
            raise ChatFailed(str(error)) from None


def _parse(parts: Iterator[bytes]) -> Iterator[dict[str, Any]]:
    """The chunks of a stream; raises ChatFailed when it ends without [DONE]."""
    reader = EventReader()
    for part in parts:
        for data in reader.feed(part):
            if data.strip() == "[DONE]":
                return
            yield _chunk(data)
    raise ChatFailed("the reply broke off, or this is not an OpenAI-compatible server")


def _chunk(data: str) -> dict[str, Any]:
    try:
        chunk = orjson.loads(data)
    except ValueError:
        chunk = None
    match chunk:
        case {"error": {"message": message}}:
            raise ChatFailed(str(message))
        case {"choices": [*choices]} if all(isinstance(each, dict) for each in choices):
            return dict(chunk)
    raise ChatFailed(f"the server sent something that is no part of a reply: {data[:80]}")


def _parts(chunk: dict[str, Any]) -> Iterator[Part]:
    """The parts of a reply in one chunk."""
    match chunk.get("prefill_progress"):
        case {"done_tokens": int(done), "prompt_tokens": int(total)}:
            yield PrefillProgress(done, total)
    for choice in chunk["choices"]:
        delta = _object(choice.get("delta"))
        if reasoning := delta.get("reasoning_content"):
            yield Reasoning(str(reasoning))
        if text := delta.get("content"):
            yield str(text)
        calls = delta.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            function = _object(_object(call).get("function"))
            yield ToolCall(str(function.get("name") or ""), str(function.get("arguments") or ""))


def _object(value: Any) -> dict[str, Any]:
    """What a server sent where an object belongs; an empty one when it sent something else."""
    return value if isinstance(value, dict) else {}


def _message(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered {response.status_code}"
