"""The HTTP client of the bench: one streamed chat completion at a time, or many at once."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import orjson

from rekindle.bench.options import BenchOptions
from rekindle.bench.reply import Recording, Reply
from rekindle.bench.stream import BenchFailed, error_message, parse

Message = dict[str, Any]

# Nothing queues on our side when questions are asked at once; and every request has a connection
# of its own: llama.cpp's server promises keep-alive after a stream and closes all the same.
LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=0)


class Refused(BenchFailed):
    """The server answered with an error status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"the server answered {status}: {message}")
        self.status = status


class Client:
    """Sends chats to one model of one server."""

    def __init__(self, http: httpx.AsyncClient, model: str) -> None:
        self._http = http
        self.model = model

    async def chat(self, messages: Sequence[Message], max_tokens: int, **extra: Any) -> Reply:
        """One greedy streamed reply, or BenchFailed."""
        body = {
            "model": self.model,
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **extra,
        }
        recording = Recording(sent_s=time.perf_counter())
        try:
            async with self._http.stream("POST", "chat/completions", json=body) as response:
                await _check(response)
                async for line in response.aiter_lines():
                    if chunk := parse(line):
                        recording.take(chunk, time.perf_counter())
        except httpx.HTTPError as error:
            raise _unreachable(self._http, error) from error
        return recording.finish(time.perf_counter())


@asynccontextmanager
async def connect(
    options: BenchOptions, transport: httpx.AsyncBaseTransport | None = None
) -> AsyncIterator[Client]:
    """A client for the options' model, or for the first the server lists."""
    async with httpx.AsyncClient(
        base_url=options.api_url,
        headers={"Authorization": f"Bearer {options.api_key}"} if options.api_key else {},
        timeout=options.timeout_s,
        limits=LIMITS,
        trust_env=False,  # a proxy from the environment would be measured along with the server
        transport=transport,
    ) as http:
        yield Client(http, options.model or await _first_model(http))


async def _first_model(http: httpx.AsyncClient) -> str:
    try:
        response = await http.get("models")
        await _check(response)
        return str(response.json()["data"][0]["id"])
    except httpx.HTTPError as error:
        raise _unreachable(http, error) from error
    except (ValueError, LookupError, TypeError) as error:
        raise BenchFailed("the server lists no model; name one with --model") from error


async def _check(response: httpx.Response) -> None:
    if response.is_success:
        return
    text = (await response.aread()).decode(errors="replace")
    try:
        message = error_message(orjson.loads(text)["error"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        message = text[:200] or response.reason_phrase
    raise Refused(response.status_code, message)


def _unreachable(http: httpx.AsyncClient, error: httpx.HTTPError) -> BenchFailed:
    return BenchFailed(f"no answer from {http.base_url}: {type(error).__name__} {error}".rstrip())
