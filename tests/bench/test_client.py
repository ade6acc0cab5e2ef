from __future__ import annotations

import asyncio
from collections.abc import Callable

import httpx
import orjson
import pytest

from rekindle.bench.client import (
    BenchFailed,
    BenchOptions,
    ErrorStatus,
    Recording,
    StreamedReply,
    Usage,
    connect,
)

Handler = Callable[[httpx.Request], httpx.Response]

HELLO = [{"role": "user", "content": "hello"}]
STREAM = (
    b'data: {"choices":[{"delta":{"content":"hi"}}]}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":1}}\n\n'
    b"data: [DONE]\n\n"
)

ROLE = '{"choices":[{"delta":{"role":"assistant","content":null}}]}'
TEXT = '{"choices":[{"delta":{"content":" hi"}}]}'
USAGE = '{"choices":[],"usage":{"prompt_tokens":10,"completion_tokens":2}}'


def ask(handler: Handler, model: str | None = "m", api_key: str | None = None) -> StreamedReply:
    options = BenchOptions(base_url="http://server", model=model, api_key=api_key)

    async def once() -> StreamedReply:
        async with connect(options, httpx.MockTransport(handler)) as client:
            return await client.chat(HELLO, 7)

    return asyncio.run(once())


def test_a_chat_is_greedy_streamed_and_asks_for_usage() -> None:
    seen: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, content=STREAM)

    reply = ask(handler, api_key="secret")
    assert (reply.text, reply.usage.completion_tokens) == ("hi", 1)
    assert seen[0].url == "http://server/v1/chat/completions"
    assert seen[0].headers["authorization"] == "Bearer secret"
    assert orjson.loads(seen[0].content) == {
        "model": "m",
        "messages": HELLO,
        "max_tokens": 7,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_the_first_listed_model_is_used_when_none_is_named() -> None:
    models: list[str] = []

    def handler(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "first"}, {"id": "second"}]})
        models.append(orjson.loads(request.content)["model"])
        return httpx.Response(200, content=STREAM)

    ask(handler, model=None)
    assert models == ["first"]


def test_a_server_without_models_fails_with_a_remedy() -> None:
    with pytest.raises(BenchFailed, match="--model"):
        ask(lambda _: httpx.Response(200, json={"data": []}), model=None)


@pytest.mark.parametrize(
    ("response", "words"),
    [
        (httpx.Response(400, json={"error": {"message": "no such field"}}), "400: no such field"),
        (httpx.Response(502, text="bad gateway"), "502: bad gateway"),
        (httpx.Response(503), "503: Service Unavailable"),
    ],
)
def test_an_error_status_is_reported_with_the_message_of_the_server(
    response: httpx.Response, words: str
) -> None:
    with pytest.raises(ErrorStatus, match=words):
        ask(lambda _: response)


def test_a_missing_server_fails_with_its_address() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    with pytest.raises(BenchFailed, match=r"http://server/v1/ \(refused\)\. Start one with"):
        ask(handler)


def recorded(*events: str) -> StreamedReply:
    """A reply sent at 0 s, whose nth event arrives at n s. It ends one second later."""
    recording = Recording(sent_s=0.0)
    for number, data in enumerate(events, 1):
        recording.take(data, float(number))
    return recording.finish(len(events) + 1.0)


def test_the_text_of_the_deltas_is_the_text_of_the_reply() -> None:
    assert recorded(TEXT, TEXT, USAGE).text == " hi hi"


def test_usage_is_read_from_a_chunk_without_choices() -> None:
    data = (
        '{"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":2,'
        '"prompt_tokens_details":{"cached_tokens":7}}}'
    )
    assert recorded(data).usage == Usage(9, 2, 7)


def test_cached_tokens_are_unknown_if_the_server_does_not_report_them() -> None:
    assert recorded(USAGE).usage == Usage(10, 2, None)


def test_an_error_event_fails_with_the_message_of_the_server() -> None:
    with pytest.raises(BenchFailed, match="out of memory"):
        recorded('{"error":{"message":"out of memory"}}')


@pytest.mark.parametrize(
    "data",
    [
        "not json",
        "[]",
        '{"choices":[3]}',
        '{"choices":[{"delta":{"content":[]}}]}',
        '{"usage":{"total":1}}',
    ],
)
def test_an_event_that_is_not_a_chunk_fails_and_is_quoted(data: str) -> None:
    with pytest.raises(BenchFailed, match="not a chunk"):
        recorded(data)


def test_the_first_token_is_the_first_text_and_not_the_role() -> None:
    reply = recorded(ROLE, TEXT, TEXT, USAGE, "[DONE]")
    assert (reply.text, reply.ttft_s, reply.last_s) == (" hi hi", 2.0, 3.0)


def test_reasoning_starts_the_clock_but_is_not_text() -> None:
    reply = recorded('{"choices":[{"delta":{"reasoning_content":"hm"}}]}', TEXT, USAGE)
    assert (reply.text, reply.ttft_s) == (" hi", 1.0)


def test_a_reply_without_text_is_timed_at_its_end() -> None:
    assert recorded(ROLE, USAGE).ttft_s == 3.0


def test_a_stream_without_usage_fails() -> None:
    with pytest.raises(BenchFailed, match="without usage"):
        recorded(TEXT, "[DONE]")
