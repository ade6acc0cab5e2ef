"""Anthropic's Messages API on the real server shares one cache with all dialects and reports true
figures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest

from tests.api.anthropic.stream_grammar import events_of, message_of
from tests.support.server import Server, running
from tests.support.tiny import write_llama

GREEDY: dict[str, Any] = {"extra_body": {"temperature": 0}}
PATH = "/v1/messages"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    with running(write_llama(folder / "tiny.gguf", context=8192), folder) as started:
        yield started


@pytest.fixture
def client(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def system(about: str) -> str:
    """A long system prompt that no other test uses."""
    return f"{about} is what you know all about. " * 20


def ask(server: Server, messages: list[Any], **fields: Any) -> dict[str, Any]:
    body = {"max_tokens": 8, "temperature": 0, "messages": messages, **fields}
    with server.client() as http:
        response = http.post(PATH, json=body)
    assert response.status_code == httpx.codes.OK, response.text
    return message_of(events_of(response)) if fields.get("stream") else dict(response.json())


def total(usage: dict[str, Any]) -> int:
    counts = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    return sum(usage[count] for count in counts)


def test_a_conversation_from_chat_completions_continues_with_the_same_blocks(
    server: Server,
) -> None:
    messages = [{"role": "user", "content": "Where are we?"}]
    begun = [{"role": "system", "content": system("harbours")}, *messages]
    chat = {"messages": begun, "max_tokens": 8, "temperature": 0}
    with server.client() as http:
        first = http.post("/v1/chat/completions", json=chat).json()
    reply = first["choices"][0]["message"]["content"]
    history = [*messages, {"role": "assistant", "content": reply}, *messages]
    second = ask(server, history, system=system("harbours"))
    computed = first["usage"]["prompt_tokens"] + first["usage"]["completion_tokens"]
    assert (
        second["usage"]["cache_read_input_tokens"] == computed - 1
    )  # the last token was sampled but not computed
    text = second["content"][0]["text"]
    chat["messages"] = [begun[0], *history, {"role": "assistant", "content": text}, *messages]
    with server.client() as http:
        third = http.post("/v1/chat/completions", json=chat).json()
    known = total(second["usage"]) + second["usage"]["output_tokens"]
    assert third["usage"]["prompt_tokens_details"]["cached_tokens"] == known - 1


@pytest.mark.parametrize("stream", [False, True])
def test_cache_read_and_creation_tokens_are_the_reused_and_computed_tokens(
    server: Server, stream: bool
) -> None:
    control = {"type": "ephemeral", "ttl": "1h"}
    words = system(f"{stream} tides")
    marked = {"type": "text", "text": words, "cache_control": control}
    question = [{"role": "user", "content": "When?"}]
    first = ask(server, question, system=[marked], stream=stream)
    assert first["usage"]["input_tokens"] == 0
    assert first["usage"]["cache_creation_input_tokens"] > len(words)
    reply = {"role": "assistant", "content": first["content"]}
    second = ask(server, [*question, reply, *question], system=[marked], stream=stream)
    computed = total(first["usage"]) + first["usage"]["output_tokens"]
    assert second["usage"]["cache_read_input_tokens"] == computed - 1
    assert (
        second["usage"]["cache_creation"]["ephemeral_1h_input_tokens"]
        == (second["usage"]["cache_creation_input_tokens"])
    )


def test_count_tokens_agrees_with_the_usage_of_a_message(client: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {
        "model": "tiny",
        "system": "Be brief.",
        "messages": [{"role": "user", "content": "hello"}],
        "tools": [{"name": "look", "input_schema": {"type": "object"}}],
    }
    message = client.messages.create(**asked, max_tokens=1, **GREEDY)
    spent = message.usage
    assert spent.cache_read_input_tokens is not None
    counted = client.messages.count_tokens(**asked).input_tokens
    assert counted == spent.input_tokens + spent.cache_read_input_tokens


def test_the_error_for_a_long_prompt_says_by_how_much(client: anthropic.Anthropic) -> None:
    messages: Any = [{"role": "user", "content": "x" * 9000}]
    with pytest.raises(anthropic.BadRequestError, match=r"too long: \d{4} tokens > 8192 maximum"):
        client.messages.create(model="tiny", max_tokens=1, messages=messages)


def test_the_stop_sequence_is_reported(server: Server) -> None:
    question = [{"role": "user", "content": "hello"}]
    text = ask(server, question)["content"][0]["text"]
    stopped = ask(server, question, stop_sequences=[text[2]])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", text[2])


def test_a_forced_tool_call_can_be_answered_and_replayed(server: Server) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [1, 2]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    fields: dict[str, Any] = {
        "tools": [{"name": "count", "input_schema": schema}],
        "system": system("numbers"),
        "max_tokens": 200,
    }
    single = {"type": "tool", "name": "count", "disable_parallel_tool_use": True}
    question = [{"role": "user", "content": "Count."}]
    first = ask(server, question, tool_choice=single, stream=True, **fields)
    assert first["stop_reason"] == "tool_use"
    call = first["content"][-1]
    assert call["input"]["n"] in (1, 2)
    result = {
        "type": "tool_result",
        "tool_use_id": call["id"],
        "content": [{"type": "text", "text": "done"}],
    }
    history = [*question, {"role": "assistant", "content": first["content"]}]
    second = ask(server, [*history, {"role": "user", "content": [result]}], **fields)
    assert second["usage"]["cache_read_input_tokens"] >= total(first["usage"])


def test_the_report_says_what_changed_in_a_conversation(server: Server) -> None:
    def asked(previous: str | None, about: str, *words: str) -> dict[str, Any]:
        roles = ("user", "assistant")
        messages = [{"role": roles[at % 2], "content": word} for at, word in enumerate(words)]
        named = {"diagnostics": {"previous_message_id": previous}}
        return ask(server, messages, system=system(about), **named)

    first = asked(None, "ships", "One.")
    assert first["diagnostics"] is None
    reply = first["content"][0]["text"]
    grown = asked(first["id"], "ships", "One.", reply, "Two.")
    assert grown["diagnostics"] is None
    edited = asked(first["id"], "ships", "Another.", reply, "Two.")
    assert edited["diagnostics"]["cache_miss_reason"]["type"] == "messages_changed"
    other = asked(first["id"], "boats", "One.", reply, "Two.")
    assert other["diagnostics"]["cache_miss_reason"]["type"] == "system_changed"
    strange = asked("msg_nobody", "ships", "One.")
    assert strange["diagnostics"]["cache_miss_reason"]["type"] == "previous_message_not_found"


def billed(version: str, *, as_list: bool) -> Any:
    """A system prompt that begins like Claude Code's."""
    line = f"x-anthropic-billing-header: cc_version=2.1.325.{version}; cc_entrypoint=cli;"
    rules = system("billing")
    if not as_list:
        return f"{line}\n{rules}"
    return [{"type": "text", "text": line}, {"type": "text", "text": rules}]


@pytest.mark.parametrize("as_list", [False, True])
def test_a_changing_billing_line_does_not_prevent_reuse(server: Server, as_list: bool) -> None:
    """See vllm-mlx PR 277."""
    question = [{"role": "user", "content": f"Who pays {as_list}?"}]
    ask(server, question, system=billed("0dc", as_list=not as_list))
    other = billed("f3a" if as_list else "e4b", as_list=as_list)
    again = ask(server, question, system=other)
    assert again["x_cache"]["normalised"] == ["claude-code-billing-header"]
    assert again["usage"]["input_tokens"] == 1  # the last token of a prompt is always computed
    plain = ask(server, question, system=other, normalise=False)
    assert "normalised" not in plain["x_cache"]
    assert plain["usage"]["input_tokens"] > len(system("billing"))


def test_a_system_message_in_mid_conversation_costs_only_its_own_tokens(server: Server) -> None:
    """Claude Code sends it first as a list and later as a string."""
    note = "It is noon, and all is well."
    listed = {"role": "system", "content": [{"type": "text", "text": note}]}
    question = {"role": "user", "content": "What time is it?"}
    first = ask(server, [question, listed], system=system("clocks"))
    reply = {"role": "assistant", "content": first["content"]}
    plain = {"role": "system", "content": note}
    second = ask(server, [question, plain, reply, question], system=system("clocks"))
    computed = total(first["usage"]) + first["usage"]["output_tokens"]
    assert second["usage"]["cache_read_input_tokens"] == computed - 1
