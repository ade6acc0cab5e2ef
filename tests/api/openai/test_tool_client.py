"""Tools, forms and reasoning through OpenAI's own Python client and LangChain."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from openai.types.chat import ChatCompletionMessageParam
from pydantic import BaseModel, SecretStr

from rekindle.protocol.events import Started
from rekindle.protocol.requests import ToolUse
from tests.api.live import live
from tests.api.scripted import (
    Front,
    Script,
    ScriptedRuntime,
    calling,
    delta,
    finished,
    reasoning,
    reply,
)

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hello"}]
PARIS, ROME = '{"city": "Paris", "days": 2}', '{"city": "Rome", "days": 1}'


class GetWeather(BaseModel):
    """Weather of a city."""

    city: str
    days: int


WEATHER = openai.pydantic_function_tool(GetWeather)
PLAIN: Any = {"type": "function", "function": {"name": "GetWeather", "parameters": {}}}
CALLS = calling(("GetWeather", PARIS), ("GetWeather", ROME))
JSON = reply('{"city": ', '"Paris", ', '"days": 2}')
REASONED: Script = [
    Started(0, 10, 0),
    reasoning("Hm, "),
    reasoning("two."),
    delta("2"),
    finished(),
]


@contextmanager
def client_of(*scripts: Script) -> Iterator[tuple[openai.OpenAI, ScriptedRuntime]]:
    runtime = ScriptedRuntime(*scripts)
    with (
        live(Front(runtime)) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client, runtime


def test_calls_come_whole_and_can_be_answered() -> None:
    with client_of(CALLS, reply("Sunny.")) as (client, runtime):
        first = client.chat.completions.create(model="default", messages=MESSAGES, tools=[PLAIN])
        message = first.choices[0].message
        assert message.content is None
        assert message.tool_calls is not None
        assert [call.type for call in message.tool_calls] == ["function", "function"]
        assert first.choices[0].finish_reason == "tool_calls"
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": "sun"}
            for call in message.tool_calls
        ]
        history: Any = [*MESSAGES, message, *results]
        client.chat.completions.create(model="default", messages=history, tools=[PLAIN])
    sent = runtime.requests[1].messages
    assert sent is not None
    assert sent[1] == {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": f"call_{n}", "type": "function",
             "function": {"name": "GetWeather", "arguments": arguments}}
            for n, arguments in enumerate((PARIS, ROME))
        ],
    }  # fmt: skip
    assert runtime.requests[1].tools == [PLAIN]


def test_streamed_calls_can_be_put_together() -> None:
    with client_of(CALLS) as (client, _):
        stream = client.chat.completions.create(
            model="default", messages=MESSAGES, tools=[PLAIN], stream=True
        )
        names: dict[int, str] = {}
        arguments: dict[int, str] = {}
        for chunk in stream:
            for call in chunk.choices[0].delta.tool_calls or ():
                assert call.function is not None
                if call.id:
                    names[call.index] = f"{call.id} {call.function.name}"
                before = arguments.get(call.index, "")
                arguments[call.index] = before + (call.function.arguments or "")
    assert names == {0: "call_0 GetWeather", 1: "call_1 GetWeather"}
    assert arguments == {0: PARIS, 1: ROME}


def test_a_form_is_parsed_into_its_model() -> None:
    with client_of(JSON) as (client, runtime):
        answer = client.chat.completions.parse(
            model="default", messages=MESSAGES, response_format=GetWeather
        )
    assert answer.choices[0].message.parsed == GetWeather(city="Paris", days=2)
    assert runtime.requested.structured_output is not None
    schema = runtime.requested.structured_output.schema
    assert isinstance(schema, dict)
    assert schema["required"] == ["city", "days"]


def test_calls_are_parsed_into_their_models() -> None:
    with client_of(CALLS) as (client, runtime):
        answer = client.chat.completions.parse(
            model="default", messages=MESSAGES, tools=[WEATHER], tool_choice="required"
        )
    calls = answer.choices[0].message.tool_calls
    assert calls is not None
    assert [call.function.parsed_arguments for call in calls] == [
        GetWeather(city="Paris", days=2),
        GetWeather(city="Rome", days=1),
    ]
    assert runtime.requested.tool_use == ToolUse(choice="required", parallel=False)
    assert runtime.requested.tools is not None
    assert runtime.requested.tools[0]["function"]["strict"] is True


def test_the_stream_helper_parses_a_form() -> None:
    with (
        client_of(JSON) as (client, _),
        client.chat.completions.stream(
            model="default", messages=MESSAGES, response_format=GetWeather
        ) as stream,
    ):
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"content.delta", "content.done"} <= kinds
    assert final.choices[0].message.parsed == GetWeather(city="Paris", days=2)


def test_the_stream_helper_parses_calls_and_a_form_that_was_not_used() -> None:
    with (
        client_of(CALLS) as (client, _),
        client.chat.completions.stream(
            model="default", messages=MESSAGES, tools=[WEATHER], response_format=GetWeather
        ) as stream,
    ):
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion()
    assert [event.parsed_arguments for event in done] == [
        GetWeather(city="Paris", days=2),
        GetWeather(city="Rome", days=1),
    ]
    message = final.choices[0].message
    assert message.content is None
    assert message.tool_calls is not None
    assert [call.id for call in message.tool_calls] == ["call_0", "call_1"]
    assert final.choices[0].finish_reason == "tool_calls"


def test_reasoning_is_put_together_by_the_stream_helper() -> None:
    with (
        client_of(REASONED) as (client, _),
        client.chat.completions.stream(model="default", messages=MESSAGES) as stream,
    ):
        message: Any = stream.get_final_completion().choices[0].message
    assert (message.content, message.reasoning_content) == ("2", "Hm, two.")


def test_a_choice_among_tools_that_are_not_there_is_the_clients_own_exception() -> None:
    with client_of(CALLS) as (client, _), pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(
            model="default",
            messages=MESSAGES,
            tools=[PLAIN],
            tool_choice={"type": "function", "function": {"name": "other"}},
        )
    assert refused.value.param == "tool_choice"


# -- LangChain -----------------------------------------------------------------------------------


@tool
def get_weather(city: str, days: int) -> str:
    """Weather of a city."""
    return f"{city}: sun for {days} days"


@contextmanager
def langchain_of(*scripts: Script) -> Iterator[tuple[ChatOpenAI, ScriptedRuntime]]:
    runtime = ScriptedRuntime(*scripts)
    with live(Front(runtime)) as server:
        yield (
            ChatOpenAI(
                model="default",
                base_url=f"{server.url}/v1",
                api_key=SecretStr("none"),
                max_retries=0,
            ),
            runtime,
        )


@pytest.mark.parametrize("stream", [False, True])
def test_langchain_completes_a_tool_loop(stream: bool) -> None:
    with langchain_of(calling(("get_weather", PARIS)), reply("Sunny.")) as (model, runtime):
        bound = model.bind_tools([get_weather])
        asked = HumanMessage("How is it in Paris?")
        first: Any = None
        if stream:
            for chunk in bound.stream([asked]):
                first = chunk if first is None else first + chunk
        else:
            first = bound.invoke([asked])
        [call] = first.tool_calls
        assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris", "days": 2})
        answered = ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])
        called = AIMessage(content=first.content, tool_calls=first.tool_calls)
        assert bound.invoke([asked, called, answered]).content == "Sunny."
    sent = runtime.requests[1].messages
    assert sent is not None
    assert sent[1]["tool_calls"][0]["function"]["name"] == "get_weather"
    assert sent[2] == {
        "role": "tool", "content": "Paris: sun for 2 days", "tool_call_id": "call_0",
    }  # fmt: skip


def test_langchain_gets_a_form() -> None:
    with langchain_of(JSON) as (model, runtime):
        found = model.with_structured_output(GetWeather, method="json_schema").invoke("Paris?")
    assert found == GetWeather(city="Paris", days=2)
    assert runtime.requested.structured_output is not None
