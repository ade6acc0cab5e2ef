"""A thread keeps its messages, system prompt and tools; a request sends only new messages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anthropic
import httpx
import pytest
from anthropic import beta_tool

from rekindle.api.base import documents
from rekindle.protocol.events import Started
from tests.api.anthropic.asking import HELLO, TOOL, ask
from tests.api.anthropic.stream_grammar import events_of, message_of
from tests.api.live import live
from tests.api.responses.asking import Documents, StoppedRuntime
from tests.api.scripted import (
    Front,
    Script,
    ScriptedRuntime,
    calling,
    delta,
    failed,
    finished,
    reasoning,
    reply,
)

CREATE = {"thread": {"type": "create"}}
THINKING: Script = [Started(0, 10, 0), reasoning("Hm."), delta("Hello"), finished()]


def front_of(*scripts: Script, documents: Documents | None = None) -> Front:
    return Front(ScriptedRuntime(*scripts, answers=(documents or Documents()).answer))


def answered(front: Front, **fields: Any) -> dict[str, Any]:
    response = ask(front, **fields)
    assert response.status_code == httpx.codes.OK, response.text
    return message_of(events_of(response)) if fields.get("stream") else dict(response.json())


def going_on(message: dict[str, Any], *texts: str) -> dict[str, Any]:
    """The fields of a request that continues the thread."""
    return {
        "thread": {"type": "continue", "previous_message_id": message["id"]},
        "messages": [{"role": "user", "content": text} for text in texts],
    }


@pytest.mark.parametrize("stream", [False, True])
def test_a_continued_thread_has_the_prompt_of_the_whole_conversation(stream: bool) -> None:
    about = {"system": "Be brief.", "tools": [TOOL], "stream": stream}
    front = front_of(THINKING, reply("Fine."), reply("Bye."))
    first = answered(front, **CREATE, **about)
    second = answered(front, **going_on(first, "And you?"), stream=stream)
    answered(front, **going_on(second, "Bye."), stream=stream)
    whole = [
        *HELLO["messages"],
        {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": "And you?"},
        {"role": "assistant", "content": "Fine."},
        {"role": "user", "content": "Bye."},
    ]
    answered(front, **about, messages=whole)
    *_, continued, sent = front.runtime.requests
    assert continued.messages == sent.messages
    assert continued.tools == sent.tools


def test_a_continued_thread_names_the_state_that_its_last_message_left() -> None:
    front = front_of()
    first = answered(front, **CREATE)
    second = answered(front, **going_on(first, "more"))
    begun, continued = (request.names for request in front.runtime.requests)
    assert begun is not None
    assert continued is not None
    assert (begun.cache_key, begun.entry_key) == (None, first["id"])
    assert (continued.cache_key, continued.entry_key) == (first["id"], second["id"])


def test_a_message_without_a_thread_is_not_stored() -> None:
    kept = Documents()
    message = answered(front_of(documents=kept))
    assert not kept.kept
    response = ask(front_of(documents=kept), **going_on(message, "more"))
    assert response.status_code == httpx.codes.NOT_FOUND


@pytest.mark.parametrize("key", ["msg_0", "resp_0"])
@pytest.mark.parametrize("stream", [False, True])
def test_an_unknown_thread_is_an_error_with_a_remedy_and_a_code(key: str, stream: bool) -> None:
    kept = Documents()
    kept.kept["resp_0"] = b"{}"  # of another kind
    front = front_of(documents=kept)
    response = ask(front, **going_on({"id": key}, "more"), stream=stream)
    assert response.status_code == httpx.codes.NOT_FOUND
    error = response.json()["error"]
    assert error["type"] == "not_found_error"
    assert error["details"] == {"error_code": "thread_not_found"}
    assert key in error["message"]
    assert 'Send the whole conversation with `thread: {"type": "create"}`' in error["message"]
    assert not front.runtime.requests


def test_a_thread_can_be_continued_twice_from_the_same_message() -> None:
    front = front_of()
    first = answered(front, **CREATE)
    for text in ("one", "two"):
        answered(front, **going_on(first, text))
    _, one, two = front.runtime.requests
    assert [(each.messages or [])[-1]["content"] for each in (one, two)] == ["one", "two"]


def test_the_system_prompt_and_the_tools_of_a_thread_stay() -> None:
    front = front_of()
    first = answered(front, **CREATE, system="Be brief.", tools=[TOOL])
    answered(front, **going_on(first, "more"), system="Be brief.", tools=[TOOL])
    changed = {"system": "Be long.", "tools": []}
    response = ask(front, **going_on(first, "more"), **changed)
    assert response.status_code == httpx.codes.BAD_REQUEST
    error = response.json()["error"]
    assert error["details"] == {"error_code": "thread_fingerprint_mismatch"}
    assert "`system` and `tools` cannot change" in error["message"]


def test_a_forced_call_of_a_threads_tool_excludes_a_format() -> None:
    front = front_of()
    first = answered(front, **CREATE, tools=[TOOL])
    form = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    response = ask(front, **going_on(first, "x"), tool_choice={"type": "any"}, output_config=form)
    assert response.status_code == httpx.codes.BAD_REQUEST
    assert "forces a call" in response.json()["error"]["message"]


def test_arguments_that_are_null_and_marks_of_cached_state() -> None:
    """Stored messages keep every value of a call, and no `cache_control`."""
    call = {"type": "tool_use", "id": "a", "name": "look", "input": {"at": None}}
    marked = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [marked]}
    messages = [
        {"role": "user", "content": [marked]},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    front = front_of()
    first = answered(front, **CREATE, messages=messages, tools=[TOOL])
    answered(front, **going_on(first, "more"))
    begun, continued = front.runtime.requests
    assert begun.names is not None
    assert begun.names.pin_s == 300
    assert continued.names is not None
    assert continued.names.pin_s is None
    assert (continued.messages or [])[: len(begun.messages or ())] == begun.messages


@pytest.mark.parametrize("stream", [False, True])
def test_a_turn_that_fails_leaves_the_thread_as_it_was(stream: bool) -> None:
    kept = Documents()
    died = failed(503, "server_error", None, "died")
    front = front_of(reply("Hello"), [Started(0, 10, 0), delta("x"), died], documents=kept)
    first = answered(front, **CREATE)
    ask(front, **going_on(first, "more"), stream=stream)
    assert set(kept.kept) == {first["id"]}


def test_a_reply_whose_thread_cannot_be_stored_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "SAVE_TIMEOUT_S", 0.01)
    for runtime in (
        StoppedRuntime(answers=Documents().answer),
        ScriptedRuntime(answers=Documents(has_room=False).answer),
    ):
        front = Front(runtime)
        message = answered(front, **CREATE)
        assert message["content"][0]["text"] == "Hello"
        assert ask(front, **going_on(message, "more")).status_code == httpx.codes.NOT_FOUND


@contextmanager
def client_of(*scripts: Script) -> Iterator[tuple[anthropic.Anthropic, ScriptedRuntime]]:
    runtime = ScriptedRuntime(*scripts, answers=Documents().answer)
    with (
        live(Front(runtime)) as server,
        anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0) as client,
    ):
        yield client, runtime


def contents(runtime: ScriptedRuntime, number: int) -> list[Any]:
    return [each["content"] for each in runtime.requests[number].messages or ()]


def test_the_clients_own_threads_continue_the_conversation() -> None:
    with client_of(reply("Hello"), reply("Fine."), reply("Bye.")) as (client, runtime):
        thread = client.beta.messages.thread(model="tiny", max_tokens=64, system="Be brief.")
        first = thread.send({"role": "user", "content": "hello"})
        assert thread.previous_message_id == first.id
        with thread.stream({"role": "user", "content": "And you?"}) as stream:
            assert "".join(stream.text_stream) == "Fine."
        thread.send({"role": "user", "content": "Bye."})
    assert contents(runtime, 2) == ["Be brief.", "hello", "Hello", "And you?", "Fine.", "Bye."]


def test_the_clients_own_threads_recover_from_a_lost_thread() -> None:
    with client_of(reply("Hello"), reply("Fine.")) as (client, runtime):
        thread = client.beta.messages.thread(model="tiny", max_tokens=64)
        first = thread.send({"role": "user", "content": "hello"})
        runtime._answers = Documents().answer  # as if the server had forgotten it
        thread.send({"role": "user", "content": "And you?"})
    assert first.id != thread.previous_message_id
    assert contents(runtime, 1) == ["hello", "Hello", "And you?"]


@pytest.mark.parametrize("streams", [False, True])
def test_the_clients_own_tool_runner_sends_only_results(streams: bool) -> None:
    @beta_tool
    def weather(city: str) -> str:
        """Tell the weather."""
        return f"sun in {city}"

    with client_of(calling(("weather", '{"city": "Paris"}')), reply("Sunny.")) as (client, runtime):
        runner = client.beta.messages.tool_runner(
            model="tiny",
            max_tokens=64,
            tools=[weather],
            messages=[{"role": "user", "content": "How is Paris?"}],
            stream=streams,
        )
        last = runner.until_done()
    assert last.content[0].type == "text"
    assert contents(runtime, 1) == ["How is Paris?", None, "sun in Paris"]
    assert runtime.requests[1].tools == runtime.requests[0].tools
