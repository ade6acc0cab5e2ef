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
    StreamChunk,
    StreamedReply,
    Usage,
    connect,
    parse_data,
)

Handler = Callable[[httpx.Request], httpx.Response]

HELLO = [{"role": "user", "content": "hello"}]
STREAM = (
    b'data: {"choices":[{"delta":{"content":"hi"}}]}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":1}}\n\n'
    b"data: [DONE]\n\n"
)

USAGE = StreamChunk(usage=Usage(prompt_tokens=10, completion_tokens=2, cached_tokens=None))


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

    with pytest.raises(BenchFailed, match=r"http://server/v1/: ConnectError refused"):
        ask(handler)


def test_the_text_of_a_delta_is_the_text_of_the_chunk() -> None:
    assert parse_data('{"choices":[{"delta":{"content":" hi"}}]}') == StreamChunk(text=" hi")


def test_the_first_chunk_with_a_role_has_no_text() -> None:
    line = '{"choices":[{"delta":{"role":"assistant","content":null}}]}'
    assert parse_data(line) == StreamChunk()


def test_reasoning_is_separate_from_the_text() -> None:
    line = '{"choices":[{"delta":{"reasoning_content":"hm"}}]}'
    assert parse_data(line) == StreamChunk(reasoning="hm")


def test_the_end_of_a_stream_is_not_a_chunk() -> None:
    assert parse_data("[DONE]") is None


def test_usage_is_read_from_a_chunk_without_choices() -> None:
    line = (
        '{"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":2,'
        '"prompt_tokens_details":{"cached_tokens":7}}}'
    )
    assert parse_data(line) == StreamChunk(usage=Usage(9, 2, 7))


def test_cached_tokens_are_unknown_if_the_server_does_not_report_them() -> None:
    line = '{"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":2}}'
    assert parse_data(line) == StreamChunk(usage=Usage(9, 2, None))


def test_an_error_event_fails_with_the_message_of_the_server() -> None:
    with pytest.raises(BenchFailed, match="out of memory"):
        parse_data('{"error":{"message":"out of memory"}}')


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
        parse_data(data)


def test_the_first_token_is_the_first_text_and_not_the_role() -> None:
    recording = Recording(sent_s=1.0)
    recording.take(StreamChunk(), 2.0)
    recording.take(StreamChunk(text="a"), 3.0)
    recording.take(StreamChunk(text="b"), 4.0)
    recording.take(USAGE, 5.0)
    reply = recording.finish(6.0)
    assert (reply.text, reply.ttft_s, reply.last_s) == ("ab", 2.0, 4.0)


def test_reasoning_starts_the_clock_but_is_not_text() -> None:
    recording = Recording(sent_s=0.0)
    recording.take(StreamChunk(reasoning="hm"), 1.0)
    recording.take(StreamChunk(text="a"), 2.0)
    recording.take(USAGE, 3.0)
    reply = recording.finish(3.0)
    assert (reply.text, reply.ttft_s) == ("a", 1.0)


def test_a_reply_without_text_is_timed_at_its_end() -> None:
    recording = Recording(sent_s=0.0)
    recording.take(USAGE, 1.0)
    assert recording.finish(2.0).ttft_s == 2.0


def test_a_stream_without_usage_fails() -> None:
    with pytest.raises(BenchFailed, match="without usage"):
        Recording(sent_s=0.0).finish(1.0)
