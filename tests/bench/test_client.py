from __future__ import annotations

import asyncio
from collections.abc import Callable

import httpx
import orjson
import pytest

from rekindle.bench.client import Refused, connect
from rekindle.bench.options import BenchOptions
from rekindle.bench.reply import Reply
from rekindle.bench.stream import BenchFailed

Handler = Callable[[httpx.Request], httpx.Response]

HELLO = [{"role": "user", "content": "hello"}]
STREAM = (
    b'data: {"choices":[{"delta":{"content":"hi"}}]}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":1}}\n\n'
    b"data: [DONE]\n\n"
)


def ask(handler: Handler, model: str | None = "m", api_key: str | None = None) -> Reply:
    options = BenchOptions(base_url="http://server", model=model, api_key=api_key)

    async def once() -> Reply:
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


def test_a_server_that_lists_no_model_fails_with_advice() -> None:
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
def test_an_error_status_is_told_with_the_servers_words(
    response: httpx.Response, words: str
) -> None:
    with pytest.raises(Refused, match=words):
        ask(lambda _: response)


def test_a_server_that_is_not_there_fails_with_its_address() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    with pytest.raises(BenchFailed, match=r"http://server/v1/: ConnectError refused"):
        ask(handler)
