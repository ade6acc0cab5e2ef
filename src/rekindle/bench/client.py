"""Sends streamed chat completions to the server under test and times the replies."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import orjson

from rekindle.errors import ConfigError, RekindleError
from rekindle.event_stream import EventReader, EventTooLarge

DEFAULT_SCENARIOS = (
    "article", "savings", "document", "agents", "decode", "sampled", "crowd", "schema", "toolloop",
)  # fmt: skip
#: "hybrid" needs a hybrid model, and "pictures" a model with a projector.
SCENARIO_NAMES = (*DEFAULT_SCENARIOS, "hybrid", "pictures")

QUICK_SCENARIOS = ("savings", "document", "decode")
MIN_TOKENS = 4  # of a shortened text or reply

#: Status codes with which servers answer to paths or fields that they do not have.
NOT_SUPPORTED = (400, 404, 405, 422, 501)

Message = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """The server to measure, the scenarios, and their sizes. Raises ConfigError."""

    base_url: str
    label: str | None = None  # for tables and plots; None: the address
    model: str | None = None  # None: the first model that the server lists
    api_key: str | None = None
    scenarios: tuple[str, ...] = DEFAULT_SCENARIOS
    repeats: int = 3
    timeout_s: float = 600.0
    seed: str | None = None  # equal seeds give equal texts; None: new texts

    article_tokens: int = 1500
    turn_reply_tokens: int = 12
    document_tokens: int = 800
    questions: int = 10
    answer_tokens: int = 16
    agents: int = 6
    agent_tokens: int = 600
    agent_rounds: int = 4  # the first round is cold and not counted
    tool_result_tokens: int = 80
    turns: int = 8
    turn_tokens: int = 300
    single_stream_tokens: int = 128
    streams: int = 8
    stream_tokens: int = 64
    kept: int = 64  # conversations on the server before the measurement
    kept_tokens: int = 40  # per conversation
    kept_again: int = 8  # conversations that are continued
    budget_s: float | None = None  # shorten texts and replies to take about this long at most
    scale: float = 1.0  # how much they were shortened

    def __post_init__(self) -> None:
        if unknown := [name for name in self.scenarios if name not in SCENARIO_NAMES]:
            raise ConfigError(
                f"unknown scenario: {', '.join(unknown)}; choose from {', '.join(SCENARIO_NAMES)}"
            )
        if self.repeats < 1 or self.agent_rounds < 2:
            raise ConfigError("a bench needs at least one repeat and two agent rounds")
        if self.kept < 1 or self.kept_again < 1:
            raise ConfigError("a crowd needs at least one conversation that is continued")

    @property
    def api_url(self) -> str:
        """The base URL with /v1, which the user may leave out."""
        address = self.base_url.rstrip("/")
        return address if address.endswith("/v1") else f"{address}/v1"


def quick_options(
    base_url: str, model: str | None = None, api_key: str | None = None
) -> BenchOptions:
    """Measure what the cache saves and how fast replies are, in less than a minute."""
    return BenchOptions(
        base_url=base_url,
        model=model,
        api_key=api_key,
        scenarios=QUICK_SCENARIOS,
        repeats=1,
        article_tokens=1000,
        document_tokens=600,
        questions=4,
        streams=4,
        single_stream_tokens=64,
        stream_tokens=48,
        budget_s=30.0,
    )


def fitted(
    options: BenchOptions, prefill_s_per_token: float, decode_s_per_token: float
) -> BenchOptions:
    """Shorten texts and replies of the quick scenarios to fit the budget."""
    if options.budget_s is None:
        return options
    # `savings` reads the article six times, and `document` its text once.
    prefill_tokens = 6 * options.article_tokens + options.document_tokens
    decode_tokens = (
        12 * options.turn_reply_tokens
        + options.questions * options.answer_tokens
        + options.single_stream_tokens
        + options.streams * options.stream_tokens
    )
    estimate_s = prefill_tokens * prefill_s_per_token + decode_tokens * decode_s_per_token
    scale = min(1.0, options.budget_s / estimate_s) if estimate_s > 0 else 1.0
    if scale == 1:
        return options

    def shortened(tokens: int) -> int:
        return max(MIN_TOKENS, round(tokens * scale))

    return replace(
        options,
        scale=scale,
        article_tokens=shortened(options.article_tokens),
        turn_reply_tokens=shortened(options.turn_reply_tokens),
        document_tokens=shortened(options.document_tokens),
        answer_tokens=shortened(options.answer_tokens),
        single_stream_tokens=shortened(options.single_stream_tokens),
        stream_tokens=shortened(options.stream_tokens),
    )


class BenchFailed(RekindleError):
    """The server behaves in a way that cannot be measured. The message says how."""


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None  # None: the server does not report it
    first_token_time: Mapping[str, float] = field(default_factory=dict)  # seconds by stage

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Usage:
        details = raw.get("prompt_tokens_details") or {}
        stages = raw.get("first_token_time") or {}
        return cls(
            raw["prompt_tokens"], raw["completion_tokens"], details.get("cached_tokens"), stages
        )


def _string(value: Any) -> str:
    if value is not None and not isinstance(value, str):
        raise TypeError("a text is a string or null")
    return value or ""


def error_message(error: Any) -> str:
    """The message of OpenAI's error object, or the whole error."""
    return str(error.get("message", error)) if isinstance(error, Mapping) else str(error)


@dataclass(frozen=True, slots=True)
class StreamedReply:
    """A reply and the times of its tokens."""

    text: str
    sent_s: float
    first_s: float  # arrival of the first text
    last_s: float  # arrival of the last text
    usage: Usage

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.sent_s


@dataclass(slots=True)
class Recording:
    """Collects a stream. The clock starts with the first text or reasoning."""

    sent_s: float
    _text: str = ""
    _times_s: list[float] = field(default_factory=list)  # arrivals of text or reasoning
    _usage: Usage | None = None

    def take(self, data: str, now_s: float) -> None:
        """Read the data of an event. Raises BenchFailed."""
        if data.strip() == "[DONE]":
            return
        try:
            self._take(orjson.loads(data), now_s)
        except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise BenchFailed(
                f"the server sent an event that is not a chunk: {data[:200]}"
            ) from error

    def _take(self, event: Mapping[str, Any], now_s: float) -> None:
        if error := event.get("error"):
            raise BenchFailed(f"the server ended the stream with an error: {error_message(error)}")
        choices = event.get("choices") or [{}]
        delta = choices[0].get("delta") or {}
        text = _string(delta.get("content"))
        if _string(delta.get("reasoning_content") or delta.get("reasoning")) or text:
            self._times_s.append(now_s)
        self._text += text
        if usage := event.get("usage"):
            self._usage = Usage.parse(usage)

    def finish(self, now_s: float) -> StreamedReply:
        """Return the reply. A reply without text is timed at its end."""
        if self._usage is None:
            raise BenchFailed("the stream ended without usage, so the tokens cannot be counted")
        times_s = self._times_s or [now_s]
        return StreamedReply(self._text, self.sent_s, times_s[0], times_s[-1], self._usage)


class ErrorStatus(BenchFailed):
    """The server answered with an error status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"the server answered {status}: {message}")
        self.status = status


class Client:
    """Sends chat requests to one model of one server."""

    def __init__(self, http: httpx.AsyncClient, model: str) -> None:
        self._http = http
        self.model = model

    async def chat(
        self, messages: Sequence[Message], max_tokens: int, **extra: Any
    ) -> StreamedReply:
        """Get one streamed reply, greedy by default."""
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
        async with self._http.stream("POST", "chat/completions", json=body) as response:
            await _check(response)
            reader = EventReader()
            async for part in response.aiter_bytes():
                for data in reader.feed(part):
                    recording.take(data, time.perf_counter())
        return recording.finish(time.perf_counter())

    async def prepare(self, messages: Sequence[Message]) -> bool:
        """Compute a prompt ahead of its first use. Returns False if the server cannot do that."""
        body = {"model": self.model, "messages": messages}
        response = await self._http.post("cache/prepare", json=body)
        if response.status_code in NOT_SUPPORTED:
            return False
        await _check(response)
        return True


@asynccontextmanager
async def connect(
    options: BenchOptions, transport: httpx.AsyncBaseTransport | None = None
) -> AsyncIterator[Client]:
    """Connect to the model of the options, or to the first model that the server lists.

    Errors of the connection raise BenchFailed at the end of the `async with` block.
    """
    async with httpx.AsyncClient(
        base_url=options.api_url,
        headers={"Authorization": f"Bearer {options.api_key}"} if options.api_key else {},
        timeout=options.timeout_s,
        # Concurrent questions must not queue here. Connections are not reused, because llama.cpp's
        # server closes them after a stream although it announces keep-alive.
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        trust_env=False,  # do not measure a proxy from the environment
        transport=transport,
    ) as http:
        try:
            yield Client(http, options.model or await _first_model(http))
        except httpx.HTTPError as error:
            raise BenchFailed(_no_answer(http.base_url, error)) from error
        except EventTooLarge as error:
            raise BenchFailed(str(error)) from None


def _no_answer(url: httpx.URL, error: httpx.HTTPError) -> str:
    if isinstance(error, httpx.ConnectError):
        return (
            f"no server answers at {url} ({error}). Start one with `rekindle serve` in another "
            "terminal, or give the URL of a running one with --base-url."
        )
    return f"no answer from {url}: {type(error).__name__} {error}".rstrip()


async def _first_model(http: httpx.AsyncClient) -> str:
    response = await http.get("models")
    await _check(response)
    try:
        return str(response.json()["data"][0]["id"])
    except (ValueError, LookupError, TypeError) as error:
        raise BenchFailed("the server lists no models; name one with --model") from error


async def _check(response: httpx.Response) -> None:
    if response.is_success:
        return
    text = (await response.aread()).decode(errors="replace")
    try:
        message = error_message(orjson.loads(text)["error"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        message = text[:200] or response.reason_phrase
    raise ErrorStatus(response.status_code, message)
