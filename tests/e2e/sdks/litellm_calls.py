"""Uses LiteLLM with each provider that can talk to this server."""

from __future__ import annotations

import json
from typing import Any

import litellm
import pytest
from litellm.exceptions import APIConnectionError, ContextWindowExceededError, NotFoundError

from tests.support.server import Server

OPENAI, VLLM, ANTHROPIC = "openai/tiny", "hosted_vllm/tiny", "anthropic/tiny"
OLLAMA, OLLAMA_CHAT = "ollama/tiny", "ollama_chat/tiny"
EXACT_TOKENS = 64  # exact answers reuse only whole prefill chunks
WITH_V1 = (OPENAI, VLLM)
QUESTION = [{"role": "user", "content": "Where is the harbour, and who keeps its light?"}]
COUNT = {
    "type": "function",
    "function": {
        "name": "count",
        "parameters": {
            "type": "object",
            "properties": {"n": {"enum": [1, 2]}},
            "required": ["n"],
            "additionalProperties": False,
        },
    },
}


def asked(model: str, server: Server, **fields: Any) -> dict[str, Any]:
    base = f"{server.url}/v1" if model in WITH_V1 else server.url
    common = {"api_base": base, "api_key": "none", "messages": QUESTION, "num_retries": 0}
    return {"model": model, "temperature": 0, "max_tokens": 12, **common, **fields}


every = pytest.mark.parametrize("model", [OPENAI, VLLM, ANTHROPIC, OLLAMA, OLLAMA_CHAT])
chats = pytest.mark.parametrize("model", [OPENAI, VLLM, ANTHROPIC])


@every
def test_an_answer_streamed_is_the_whole_one(model: str, server: Server) -> None:
    whole = litellm.completion(**asked(model, server))
    text = whole.choices[0].message.content
    assert text
    assert whole.usage.prompt_tokens > len(QUESTION[0]["content"])
    assert whole.usage.completion_tokens > 0
    chunks = litellm.completion(**asked(model, server), stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text


@every
async def test_an_answer_comes_to_who_waits_for_it(model: str, server: Server) -> None:
    answer = await litellm.acompletion(**asked(model, server))
    assert answer.choices[0].message.content


@chats
def test_a_call_is_forced_and_its_result_taken(model: str, server: Server) -> None:
    choice = {"type": "function", "function": {"name": "count"}}
    fields: dict[str, Any] = {"tools": [COUNT], "max_tokens": 200}
    first = litellm.completion(**asked(model, server, tool_choice=choice, **fields))
    call = first.choices[0].message.tool_calls[0]
    assert json.loads(call.function.arguments)["n"] in (1, 2)
    result = {"role": "tool", "tool_call_id": call.id, "content": "done"}
    history = [*QUESTION, first.choices[0].message.model_dump(), result]
    second = litellm.completion(**asked(model, server, messages=history, tools=[COUNT]))
    known = first.usage.prompt_tokens - EXACT_TOKENS
    assert second.usage.prompt_tokens_details.cached_tokens >= known


@every
def test_a_schema_is_kept(model: str, server: Server) -> None:
    schema = COUNT["function"]["parameters"]  # type: ignore[index]
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    answer = litellm.completion(**asked(model, server, response_format=form, max_tokens=200))
    assert json.loads(answer.choices[0].message.content)["n"] in (1, 2)


@chats
def test_a_prompt_that_is_too_long_is_known_as_such(model: str, server: Server) -> None:
    long = [{"role": "user", "content": "x" * 9000}]
    with pytest.raises(ContextWindowExceededError):
        litellm.completion(**asked(model, server, messages=long))


@pytest.mark.parametrize("model", [OPENAI, VLLM, OLLAMA_CHAT])
def test_a_model_that_is_not_served_is_not_found(model: str, server: Server) -> None:
    other = {**asked(model, server), "model": model.replace("tiny", "huge")}
    with pytest.raises((NotFoundError, APIConnectionError), match="huge"):
        litellm.completion(**other)


def test_a_model_is_described(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """LiteLLM sends `name` to `/api/show`, where others send `model`."""
    monkeypatch.setenv("OLLAMA_API_BASE", server.url)
    assert litellm.get_model_info(OLLAMA)["max_tokens"] == 8192
