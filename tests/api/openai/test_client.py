"""OpenAI's own Python client against the application on a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from rekindle.protocol.events import Started, TokenLogprob
from tests.api.live import Live, live
from tests.api.scripted import Front, ScriptedRuntime, failed, finished, hit, reply

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hello"}]
LOGS = [
    [TokenLogprob(b"Hel", -0.5, [(b"Hel", -0.5)])],
    [TokenLogprob(b"lo", -0.1, [(b"lo", -0.1)])],
]
DIED = failed(503, "server_error", "model_restarting", "the process died")


def client_of(server: Live, key: str = "secret") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


@pytest.fixture
def client() -> Iterator[openai.OpenAI]:
    script = reply("Hel", "lo", logs=LOGS, end=finished(cache=hit(9)))
    runtime = ScriptedRuntime([Started(0, 9, 4), *script])
    with live(Front(runtime, api_key=["secret"])) as server, client_of(server) as client:
        yield client


def test_a_chat_comes_whole(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="default", messages=MESSAGES, logprobs=True, top_logprobs=1
    )
    assert answer.choices[0].message.content == "Hello"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 9
    assert answer.model_extra is not None
    assert answer.model_extra["x_cache"]["status"] == "hit"


def test_a_chat_comes_as_a_stream_with_usage_and_cache(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="default",
        messages=MESSAGES,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"use_kv_cache": True},
    )
    *parts, usage, cache = list(stream)
    text = "".join(part.choices[0].delta.content or "" for part in [*parts, cache])
    assert text == "Hello"
    assert usage.usage is not None
    assert usage.choices == [], "OpenAI's convention for the chunk of `include_usage`"
    assert cache.choices[0].finish_reason is None
    assert cache.usage == usage.usage, "the SDK's stream helper takes it from the last chunk"
    assert cache.model_extra is not None
    assert cache.model_extra["reused_tokens"] == 9


REPORTED: dict[str, Any] = {"use_kv_cache": True, "prefill_progress": True}


def test_the_usual_loop_over_a_stream_works_to_its_end(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="default", messages=MESSAGES, stream=True, extra_body=REPORTED
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello"
    assert any("prefill_progress" in (chunk.model_extra or {}) for chunk in chunks)
    assert "reused_tokens" in (chunks[-1].model_extra or {})
    texts = client.completions.create(
        model="default", prompt="a", stream=True, extra_body={"use_kv_cache": True}
    )
    assert "".join(chunk.choices[0].text for chunk in texts) == "Hello"


def test_the_usual_loop_of_the_asynchronous_client_works_to_its_end() -> None:
    runtime = ScriptedRuntime([Started(0, 9, 4), *reply("Hel", "lo", end=finished(cache=hit(9)))])

    async def loop(url: str) -> str:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
            stream = await client.chat.completions.create(
                model="default", messages=MESSAGES, stream=True, extra_body=REPORTED
            )
            texts = [chunk.choices[0].delta.content async for chunk in stream]
        return "".join(text or "" for text in texts)

    with live(Front(runtime)) as server:
        assert asyncio.run(loop(server.url)) == "Hello"


def test_the_stream_helper_takes_the_report_for_no_part_of_the_reply(
    client: openai.OpenAI,
) -> None:
    with client.chat.completions.stream(
        model="default", messages=MESSAGES, extra_body=REPORTED
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert kinds.count("content.done") == 1
    assert final.choices[0].message.content == "Hello"
    assert final.choices[0].finish_reason == "stop"


def test_the_clients_own_stream_helper_understands_it(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="default", messages=MESSAGES, logprobs=True
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"content.delta", "content.done", "logprobs.content.delta"} <= kinds
    assert final.choices[0].message.content == "Hello"


def test_completions_come_whole_and_as_a_stream(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "default", "prompt": ["a", "b"], "logprobs": 1}
    answer = client.completions.create(**options)
    assert [choice.text for choice in answer.choices] == ["Hello", "Hello"]
    texts = {0: "", 1: ""}
    for chunk in client.completions.create(stream=True, **options):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == {0: "Hello", 1: "Hello"}


def test_models_are_listed_and_found(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "rekindle"


def test_refusals_are_the_clients_own_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="gpt-5", messages=MESSAGES)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="default", messages=MESSAGES, temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()


@pytest.mark.parametrize("stream", [False, True])
def test_an_absent_model_is_a_status_the_client_retries(stream: bool) -> None:
    runtime = ScriptedRuntime([DIED], reply("Hello"))
    with live(Front(runtime)) as server, client_of(server) as client:
        answer: Any = client.with_options(max_retries=1).chat.completions.create(
            model="default", messages=MESSAGES, stream=stream
        )
        text = (
            "".join(part.choices[0].delta.content or "" for part in answer)
            if stream
            else answer.choices[0].message.content
        )
    assert text == "Hello"
    assert len(runtime.requests) == 2


def test_a_failure_in_mid_stream_is_raised_where_it_happened() -> None:
    runtime = ScriptedRuntime(reply("Hel", end=DIED))
    with live(Front(runtime)) as server, client_of(server) as client:
        stream = client.chat.completions.create(model="default", messages=MESSAGES, stream=True)
        assert [next(stream).choices[0].delta.content for _ in range(2)] == ["", "Hel"]
        with pytest.raises(openai.APIError, match="the process died"):
            next(stream)
