"""A real server accepts the habits of real clients in chat completions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.server import Server, running
from tests.support.tiny import write_llama

CHAT = "/v1/chat/completions"
READ = {
    "type": "function",
    "function": {"name": "read", "parameters": {"type": "object", "properties": {}}},
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "read", "arguments": "{}"}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    with running(write_llama(folder / "tiny.gguf", context=8192), folder) as started:
        yield started


def ask(server: Server, messages: list[Any], session: str = "", **fields: Any) -> dict[str, Any]:
    body = {"messages": messages, "max_tokens": 8, "temperature": 0, **fields}
    with server.client() as http:
        answer = http.post(CHAT, json=body, headers={"x-session-affinity": session})
    assert answer.status_code == httpx.codes.OK, answer.text
    return dict(answer.json())


def opening(about: str) -> list[Any]:
    """A conversation that no other test uses."""
    return [
        {"role": "system", "content": f"You know all about {about}. " * 20},
        {"role": "user", "content": f"What is new about {about}?"},
    ]


def called(answered: Any) -> list[Any]:
    """The conversation up to a tool's result."""
    return [
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": answered},
    ]


def test_the_result_of_a_tool_may_be_a_list(server: Server) -> None:
    """Qwen Code sends this. The prompt equals the one for the same text as a string."""
    parts = [{"type": "text", "text": "A project."}]
    first = ask(server, [*opening("lists"), *called(parts)], tools=[READ])
    again = ask(server, [*opening("lists"), *called("A project.")], tools=[READ])
    assert again["x_cache"]["reused_tokens"] == first["usage"]["prompt_tokens"] - 1


def test_a_call_may_come_without_content(server: Server) -> None:
    """Cline sends null, and others leave the field out."""
    call, result = called("done")
    first = ask(server, [*opening("calls"), call, result], tools=[READ])
    bare = {name: value for name, value in call.items() if name != "content"}
    again = ask(server, [*opening("calls"), bare, result], tools=[READ])
    assert again["x_cache"]["reused_tokens"] == first["usage"]["prompt_tokens"] - 1


def test_fields_for_other_servers_are_ignored(server: Server) -> None:
    """pi sends `store`, Copilot CLI sends `include`, and opencode sends reasoning back."""
    reply = {"role": "assistant", "content": "Nothing.", "reasoning_content": "Hm."}
    fields: dict[str, Any] = {"store": False, "prompt_cache_key": "s", "max_completion_tokens": 8}
    asked = [*opening("fields"), reply, {"role": "user", "content": "Really?"}]
    body = {"messages": asked, "stream": True, "stream_options": {"include_usage": True}, **fields}
    with server.client() as http:
        answer = http.post(CHAT, json=body)
    assert answer.status_code == httpx.codes.OK, answer.text
    assert answer.text.rstrip().endswith("data: [DONE]")


def test_a_title_request_does_not_disturb_its_conversation(server: Server) -> None:
    """opencode sends the same `x-session-affinity` with both. A name is never trusted."""
    begun = opening("titles")
    title = [{"role": "system", "content": "You write titles."}, begun[1]]
    first = ask(server, begun, "ses_1", tools=[READ])
    ask(server, title, "ses_1")
    reply = {"role": "assistant", "content": first["choices"][0]["message"]["content"]}
    asked = [*begun, reply, {"role": "user", "content": "And then?"}]
    second = ask(server, asked, "ses_1", tools=[READ])
    computed = first["usage"]["prompt_tokens"] + first["usage"]["completion_tokens"]
    assert second["x_cache"]["reused_tokens"] >= computed - 1


@pytest.mark.parametrize("day", [["dates"], True])
def test_a_new_date_invalidates_the_rest_of_the_prompt_unless_dates_are_normalised(
    server: Server, day: Any
) -> None:
    """opencode writes the date into its system prompt."""

    def asked(date: str) -> dict[str, Any]:
        rules = f"Today's date: {date} {day}\n" + "Never guess what you can read. " * 20
        messages = [{"role": "system", "content": rules}, {"role": "user", "content": "Hello."}]
        return ask(server, messages, normalise=day)

    first, second = asked("Mon Nov 16 2026"), asked("Tue Nov 17 2026")
    reused = second["x_cache"]["reused_tokens"]
    if day is True:
        assert reused < 100
    else:
        assert reused == first["usage"]["prompt_tokens"] - 1
        assert second["x_cache"]["normalised"] == ["dates"]
