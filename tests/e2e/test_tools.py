"""Agents on the real server: tool loops, structured replies and their cost."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import ModelRequest, ModelResponse, wrap_model_call
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from openai.types.chat import ChatCompletion
from pydantic import BaseModel

from tests.support.server import Server, running
from tests.support.tiny import write_lfm2, write_mamba

STEPS = 12
EXACT = {"extra_body": {"cache_exact": True}}  # for answers that are compared
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "sweep",
            "description": "Sweep a room of the house.",
            "parameters": {
                "type": "object",
                "properties": {
                    "room": {"enum": ["kitchen", "hall", "attic"]},
                    "with": {"enum": ["broom", "mop"]},
                },
                "required": ["room", "with"],
                "additionalProperties": False,
            },
        },
    }
]


class Form(BaseModel):
    animal: Literal["cat", "dog"]
    legs: Literal[2, 4]


@pytest.fixture(scope="module")
def server(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(smollm2_path, tmp_path_factory.mktemp("server")) as started:
        yield started


def client_of(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return client_of(server)


def cached(answer: ChatCompletion) -> int:
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    return answer.usage.prompt_tokens_details.cached_tokens or 0


def held(answer: ChatCompletion) -> int:
    """The tokens with state after a reply that the model ended, which are all of them."""
    assert answer.usage is not None
    return answer.usage.prompt_tokens + answer.usage.completion_tokens


def work(client: openai.OpenAI, history: list[Any]) -> ChatCompletion:
    """One step, which must be exactly one call."""
    return client.chat.completions.create(
        model="default",
        messages=history,
        tools=TOOLS,
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        max_tokens=60,
    )


def go_on(history: list[Any], answer: ChatCompletion, step: int) -> None:
    """Send the call back like a client that parsed it, with other spacing and key order."""
    [call] = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    arguments = json.loads(call.function.arguments)
    assert set(arguments) == {"room", "with"}
    again = json.dumps(dict(reversed(arguments.items())), indent=2)
    function = {"name": call.function.name, "arguments": again}
    history += (
        {
            "role": "assistant",
            "tool_calls": [{"id": call.id, "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": call.id, "content": f"Done, room {step}."},
    )


def test_each_of_twelve_forced_steps_computes_only_its_new_message(client: openai.OpenAI) -> None:
    history: list[Any] = [{"role": "user", "content": "Clean the house."}]
    before: ChatCompletion | None = None
    for step in range(STEPS):
        answer = work(client, history)
        assert answer.choices[0].finish_reason == "tool_calls"
        if before is not None:
            assert cached(answer) == held(before)
            assert answer.usage is not None
            assert answer.usage.prompt_tokens - cached(answer) < 40  # a tool's result, in ChatML
        go_on(history, answer, step)
        before = answer


def test_a_tool_loop_continues_after_a_restart(smollm2_path: Path, tmp_path: Path) -> None:
    history: list[Any] = [{"role": "user", "content": "Clean the attic, and say how it went."}]
    with running(smollm2_path, tmp_path) as server:
        first = work(client_of(server), history)
        go_on(history, first, 0)
    with running(smollm2_path, tmp_path) as server:
        second = work(client_of(server), history)
    assert cached(second) == held(first)


def test_a_structured_reply_is_parsed_by_the_client(client: openai.OpenAI) -> None:
    asked: list[Any] = [{"role": "user", "content": "Which animal says miaow?"}]
    options: Any = {"model": "default", "temperature": 0, "max_tokens": 40, **EXACT}
    answer = client.chat.completions.parse(messages=asked, response_format=Form, **options)
    assert isinstance(answer.choices[0].message.parsed, Form)
    with client.chat.completions.stream(messages=asked, response_format=Form, **options) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == answer.choices[0].message.parsed


def test_tool_calls_arrive_parsed_and_streamed(client: openai.OpenAI) -> None:
    class Feed(BaseModel):
        animal: Literal["cat", "dog"]

    asked: Any = {
        "model": "default",
        "messages": [{"role": "user", "content": "Feed the cat."}],
        "tools": [openai.pydantic_function_tool(Feed)],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": 0,
        "max_tokens": 40,
        **EXACT,
    }
    answer = client.chat.completions.parse(**asked)
    [call] = answer.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Feed)
    with client.chat.completions.stream(**asked) as stream:
        pieces = [
            event.arguments_delta
            for event in stream
            if event.type == "tool_calls.function.arguments.delta"
        ]
        final = stream.get_final_completion()
    [streamed] = final.choices[0].message.tool_calls or []
    assert "".join(pieces) == streamed.function.arguments == call.function.arguments
    assert len(pieces) > 1


@tool
def lookup(word: Literal["tide", "moon"]) -> str:
    """Look a word up in the dictionary."""
    return f"{word}: it rises and falls"


@wrap_model_call
def calling_twice(
    request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
) -> ModelResponse[Any]:
    """Make two calls and then an answer, because a small model does not know when to stop."""
    calls = sum(isinstance(message, ToolMessage) for message in request.messages)
    choice = "any" if calls < 2 else "none"
    one = {"parallel_tool_calls": False}
    return handler(request.override(tool_choice=choice, model_settings=one))


def test_a_langchain_agent_computes_each_token_once(server: Server) -> None:
    where: Any = {"base_url": f"{server.url}/v1", "api_key": "none", "model": "default"}
    model = ChatOpenAI(**where, temperature=0, max_completion_tokens=40)
    agent = create_agent(
        model, [lookup], system_prompt="You look words up.", middleware=[calling_twice]
    )
    told: Any = {"messages": [HumanMessage("What is the tide, and what the moon?")]}
    talk = agent.invoke(told)["messages"]
    replies = [message for message in talk if isinstance(message, AIMessage)]
    assert [bool(reply.tool_calls) for reply in replies] == [True, True, False]
    assert replies[-1].text
    for before, after in pairwise(replies):
        assert before.usage_metadata is not None
        assert after.usage_metadata is not None
        reused = after.usage_metadata["input_token_details"]["cache_read"]
        assert reused >= before.usage_metadata["total_tokens"] - 1


@pytest.mark.parametrize("write", [write_lfm2, write_mamba])
def test_a_model_whose_state_cannot_be_truncated_continues_after_a_restart(
    write: Any, tmp_path: Path
) -> None:
    path = write(tmp_path / "tiny.gguf")
    history: list[Any] = [
        {"role": "system", "content": "You know the tides. " * 10},
        {"role": "user", "content": "When does it rise?"},
    ]
    flags = ("--max-model-len", "2048")
    options: Any = {"model": "default", "temperature": 0, "max_tokens": 8}
    with running(path, tmp_path, *flags) as server:
        ask = client_of(server).chat.completions.create
        first = ask(messages=history, extra_body={"ignore_eos": True}, **options)
        history += (
            {"role": "assistant", "content": first.choices[0].message.content},
            {"role": "user", "content": "And when does it fall?"},
        )
    with running(path, tmp_path, *flags) as server:
        ask = client_of(server).chat.completions.create
        second = ask(messages=history, **options)
        cold = ask(messages=history, extra_body={"use_kv_cache": False}, **options)
    assert first.usage is not None
    assert cached(second) >= first.usage.prompt_tokens - 64  # at most one checkpoint per block
    assert cached(cold) == 0
    assert second.choices[0].message.content == cold.choices[0].message.content
