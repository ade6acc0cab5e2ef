"""The HTTP client of the bench: streamed chat completions, one at a time or many at once.

Parsing and timekeeping do no I/O and read no clock; `Client` does both for them.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import orjson

from rekindle.errors import ConfigError, RekindleError
from rekindle.event_stream import EventReader, EventTooLarge

# ----------------------------------------------------------------------
# What to measure, where, and how much of it.

DEFAULT_SCENARIOS = (
    "article",
    "document",
    "agents",
    "decode",
    "sampled",
    "crowd",
    "schema",
    "toolloop",
)
SCENARIO_NAMES = (
    *DEFAULT_SCENARIOS,
    "hybrid",
    "pictures",
)  # which need a hybrid model, one with a projector


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """One bench of one server; refuses a scenario it does not know."""

    base_url: str
    label: str | None = None  # the server's name in tables and plots; its address by default
    model: str | None = None  # the first model the server lists by default
    api_key: str | None = None
    scenarios: tuple[str, ...] = DEFAULT_SCENARIOS
    repeats: int = 3
    timeout_s: float = 600.0
    seed: str | None = None  # same seed, same texts; by default no text was ever sent before

    article_tokens: int = 1500
    turn_reply_tokens: int = 12
    document_tokens: int = 800
    questions: int = 10
    answer_tokens: int = 16
    agents: int = 6
    agent_tokens: int = 600
    agent_rounds: int = 4  # the first is cold and not counted
    tool_result_tokens: int = 80
    turns: int = 8
    turn_tokens: int = 300
    single_stream_tokens: int = 128
    streams: int = 8
    stream_tokens: int = 64
    kept: int = 64  # conversations that a server keeps before it is measured
    kept_tokens: int = 40  # of each
    kept_again: int = 8  # that go on

    def __post_init__(self) -> None:
        if unknown := [name for name in self.scenarios if name not in SCENARIO_NAMES]:
            raise ConfigError(
                f"unknown scenario: {', '.join(unknown)}; there are {', '.join(SCENARIO_NAMES)}"
            )
        if self.repeats < 1 or self.agent_rounds < 2:
            raise ConfigError("a bench needs at least one repeat and two rounds of agents")
        if self.kept < 1 or self.kept_again < 1:
            raise ConfigError("a crowd needs at least one conversation that goes on")

    @property
    def api_url(self) -> str:
        """The address with its /v1, which may be given or left out."""
        address = self.base_url.rstrip("/")
        return address if address.endswith("/v1") else f"{address}/v1"

    @property
    def name(self) -> str:
        return self.label or self.base_url


Message = dict[str, Any]

# Nothing queues on our side when questions are asked at once; and every request has a connection
# of its own: llama.cpp's server promises keep-alive after a stream and closes all the same.
LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=0)


class BenchFailed(RekindleError):
    """The server did something a measurement cannot go on with; the message says what."""


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None  # None: the server does not say
    first_token_time: Mapping[str, float] = field(default_factory=dict)  # seconds by stage

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Usage:
        details = raw.get("prompt_tokens_details") or {}
        stages = raw.get("first_token_time") or {}
        return cls(
            raw["prompt_tokens"], raw["completion_tokens"], details.get("cached_tokens"), stages
        )


@dataclass(frozen=True, slots=True)
class StreamChunk:
    """One event of the stream: new text, reasoning or usage; often only one of them."""

    text: str = ""
    reasoning: str = ""
    usage: Usage | None = None


def parse_data(data: str) -> StreamChunk | None:
    """The chunk in an event's data, None at the end; raise BenchFailed for an error."""
    if data.strip() == "[DONE]":
        return None
    try:
        return _chunk(orjson.loads(data))
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise BenchFailed(f"the server sent an event that is no chunk: {data[:200]}") from error


def _chunk(event: Mapping[str, Any]) -> StreamChunk:
    if error := event.get("error"):
        raise BenchFailed(f"the server ended the stream with an error: {error_message(error)}")
    choices = event.get("choices") or [{}]
    delta = choices[0].get("delta") or {}
    usage = event.get("usage")
    return StreamChunk(
        text=_text(delta.get("content")),
        reasoning=_text(delta.get("reasoning_content") or delta.get("reasoning")),
        usage=Usage.parse(usage) if usage else None,
    )


def _text(value: Any) -> str:
    if value is not None and not isinstance(value, str):
        raise TypeError("a text is a string or null")
    return value or ""


def error_message(error: Any) -> str:
    """The sentence inside OpenAI's error shape, or the error as it came."""
    return str(error.get("message", error)) if isinstance(error, Mapping) else str(error)


@dataclass(frozen=True, slots=True)
class StreamedReply:
    """A reply and the moments at which it came."""

    text: str
    sent_s: float
    first_s: float  # when the first token's text arrived
    last_s: float  # when the last token's text arrived
    usage: Usage

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.sent_s


@dataclass(slots=True)
class Recording:
    """What a stream has brought so far; a chunk without text starts no clock."""

    sent_s: float
    _text: list[str] = field(default_factory=list)
    _first_s: float | None = None
    _last_s: float | None = None
    _usage: Usage | None = None

    def take(self, chunk: StreamChunk, now_s: float) -> None:
        if chunk.text or chunk.reasoning:
            self._first_s = now_s if self._first_s is None else self._first_s
            self._last_s = now_s
        self._text.append(chunk.text)
        self._usage = chunk.usage or self._usage

    def finish(self, now_s: float) -> StreamedReply:
        """The whole reply; one without any text is timed at its end."""
        if self._usage is None:
            raise BenchFailed("the stream ended without usage, so its tokens cannot be counted")
        first_s = now_s if self._first_s is None else self._first_s
        last_s = now_s if self._last_s is None else self._last_s
        return StreamedReply("".join(self._text), self.sent_s, first_s, last_s, self._usage)


class ErrorStatus(BenchFailed):
    """The server answered with an error status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"the server answered {status}: {message}")
        self.status = status


class Client:
    """Sends chats to one model of one server."""

    def __init__(self, http: httpx.AsyncClient, model: str) -> None:
        self._http = http
        self.model = model

    async def chat(
        self, messages: Sequence[Message], max_tokens: int, **extra: Any
    ) -> StreamedReply:
        """One streamed reply, greedy by default, or BenchFailed."""
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
                reader = EventReader()
                async for part in response.aiter_bytes():
                    for data in reader.feed(part):
                        if chunk := parse_data(data):
                            recording.take(chunk, time.perf_counter())
        except httpx.HTTPError as error:
            raise _unreachable(self._http, error) from error
        except EventTooLarge as error:
            raise BenchFailed(str(error)) from None
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
    raise ErrorStatus(response.status_code, message)


def _unreachable(http: httpx.AsyncClient, error: httpx.HTTPError) -> BenchFailed:
    return BenchFailed(f"no answer from {http.base_url}: {type(error).__name__} {error}".rstrip())
