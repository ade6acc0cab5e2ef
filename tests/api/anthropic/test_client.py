"""Anthropic's own Python client against the application on a real socket."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anthropic
import pytest
from anthropic.types import MessageParam, ToolParam
from pydantic import BaseModel

from rekindle.protocol.admin import AdminOp, AdminResult, Tokenize, Tokenized
from rekindle.protocol.events import Started
from tests.api.live import live
from tests.api.scripted import (
    Front,
    Script,
    ScriptedRuntime,
    calling,
    delta,
    failed,
    finished,
    hit,
    reasoning,
    reply,
)

HELLO: list[MessageParam] = [{"role": "user", "content": "hello"}]
WEATHER: ToolParam = {"name": "weather", "input_schema": {"type": "object"}}
PARIS = '{"city": "Paris", "days": 2}'
ASK: dict[str, Any] = {"model": "tiny", "max_tokens": 64, "messages": HELLO}
CACHED: Script = [Started(0, 10, 7, hit(7)), delta("Hel"), delta("lo"), finished(cache=hit(7))]
REASONED: Script = [Started(0, 10, 0), reasoning("Hm, "), reasoning("two."), delta("2"), finished()]


class Weather(BaseModel):
    city: str
    days: int


def counted(op: AdminOp) -> AdminResult:
    assert isinstance(op, Tokenize)
    return Tokenized(len(op.messages or ()) + 40, 4096)


@contextmanager
def client_of(*scripts: Script) -> Iterator[tuple[anthropic.Anthropic, ScriptedRuntime]]:
    runtime = ScriptedRuntime(*scripts, answers=counted)
    with (
        live(Front(runtime, api_key=["secret"])) as server,
        anthropic.Anthropic(base_url=server.url, api_key="secret", max_retries=0) as client,
    ):
        yield client, runtime


def test_a_whole_message_reports_the_tokens_read_from_the_cache() -> None:
    with client_of(CACHED) as (client, _):
        message = client.messages.create(**ASK, cache_control={"type": "ephemeral"})
    [block] = message.content
    assert block.type == "text"
    assert block.text == "Hello"
    assert message.stop_reason == "end_turn"
    assert message.usage.cache_read_input_tokens == 7
    assert message.usage.cache_creation_input_tokens == 3
    assert message.usage.cache_creation is not None
    assert message.usage.cache_creation.ephemeral_5m_input_tokens == 3


def test_the_stream_helper_puts_the_same_message_together() -> None:
    with client_of(CACHED) as (client, _), client.messages.stream(**ASK) as stream:
        assert list(stream.text_stream) == ["Hel", "lo"]
        message = stream.get_final_message()
    assert message.usage.cache_read_input_tokens == 7
    assert message.usage.output_tokens == 2
    assert message.stop_reason == "end_turn"


@pytest.mark.parametrize("streams", [False, True])
def test_a_call_can_be_answered(streams: bool) -> None:
    with client_of(calling(("weather", PARIS)), reply("Sunny.")) as (client, runtime):
        if streams:
            with client.messages.stream(**ASK, tools=[WEATHER]) as stream:
                message = stream.get_final_message()
        else:
            message = client.messages.create(**ASK, tools=[WEATHER])
        [call] = message.content
        assert call.type == "tool_use"
        assert call.input == {"city": "Paris", "days": 2}
        result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "sun"}
        history = [*HELLO, message.to_param(), {"role": "user", "content": [result]}]
        client.messages.create(**{**ASK, "messages": history}, tools=[WEATHER])
    sent = runtime.requests[1].messages
    assert sent is not None
    assert sent[1]["tool_calls"][0]["id"] == call.id == sent[2]["tool_call_id"]


def test_thinking_is_replayed() -> None:
    with client_of(REASONED, reply("Yes.")) as (client, runtime):
        with client.messages.stream(**ASK, thinking={"type": "adaptive"}) as stream:
            message = stream.get_final_message()
        assert [block.type for block in message.content] == ["thinking", "text"]
        history: Any = [*HELLO, message.to_param(), {"role": "user", "content": "Sure?"}]
        client.messages.create(**{**ASK, "messages": history})
    sent = runtime.requests[1].messages
    assert sent is not None
    assert sent[1] == {"role": "assistant", "content": "2", "reasoning_content": "Hm, two."}


def test_a_form_is_parsed_into_its_model() -> None:
    with client_of(reply('{"city": ', '"Paris", ', '"days": 2}')) as (client, runtime):
        message = client.messages.parse(**ASK, output_format=Weather)
    assert message.parsed_output == Weather(city="Paris", days=2)
    assert runtime.requested.structured_output is not None


def test_tokens_are_counted() -> None:
    with client_of() as (client, _):
        counts = client.messages.count_tokens(model="tiny", messages=HELLO, system="Be brief.")
    assert counts.input_tokens == 42


def test_models_are_listed() -> None:
    with client_of() as (client, _):
        [model] = client.models.list()
        assert model.id == "tiny"
        assert model.max_input_tokens == 4096
        assert client.models.retrieve("tiny").display_name == "tiny"


def test_the_client_knows_the_id_of_its_request() -> None:
    headers = {"x-request-id": "mine"}
    with client_of() as (client, _):
        assert client.messages.create(**ASK, extra_headers=headers)._request_id == "mine"
        with client.messages.stream(**ASK, extra_headers=headers) as stream:
            assert stream.request_id == "mine"
        with pytest.raises(anthropic.NotFoundError) as caught:
            client.messages.create(**{**ASK, "model": "gpt-7"}, extra_headers=headers)
        assert caught.value.request_id == "mine"


def test_errors_are_the_clients_own() -> None:
    with client_of([failed(503, "server_error", None, "died")]) as (client, _):
        with pytest.raises(anthropic.APIStatusError, match="died"):
            client.messages.create(**ASK)
        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(**{**ASK, "model": "gpt-7"})
        with pytest.raises(anthropic.AuthenticationError):
            client.with_options(api_key="wrong").messages.create(**ASK)


def test_an_error_in_a_stream_is_raised() -> None:
    died = failed(503, "server_error", None, "died")
    with (
        client_of([Started(0, 10, 0), delta("x"), died]) as (client, _),
        client.messages.stream(**ASK) as stream,
        pytest.raises(anthropic.APIStatusError, match="died"),
    ):
        stream.get_final_message()
