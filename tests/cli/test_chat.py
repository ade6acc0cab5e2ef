"""The conversation in the terminal, with a scripted server."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from rich.console import Console

from rekindle.cli.chat import (
    Conversation,
    PrefillProgress,
    Reasoning,
    Screen,
    ToolCallText,
    TurnCost,
    converse,
)
from rekindle.errors import RekindleError

Answer = Callable[[dict[str, Any]], httpx.Response]

USAGE = {
    "prompt_tokens": 50,
    "completion_tokens": 2,
    "prompt_tokens_details": {"cached_tokens": 40},
}


def stream(*parts: str | dict[str, Any], done: bool = True) -> httpx.Response:
    """A reply of texts and, where given, of whole chunks."""
    payloads = [
        part if isinstance(part, dict) else {"choices": [{"index": 0, "delta": {"content": part}}]}
        for part in parts
    ]
    lines = [f"data: {json.dumps(payload)}" for payload in payloads]
    return httpx.Response(200, text="\n\n".join([*lines, "data: [DONE]" if done else "", ""]))


def hello(_body: dict[str, Any]) -> httpx.Response:
    opening = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
    closing = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": None}
    return stream(opening, "Hel", "lo", closing, {"choices": [], "usage": USAGE})


class Server:
    """Answers each request from the script, and records the requests."""

    def __init__(self, *answers: Answer) -> None:
        self.requests: list[httpx.Request] = []
        self._answers = answers or (hello,)

    def __call__(self, request: httpx.Request) -> httpx.Response:
        answer = self._answers[min(len(self.requests), len(self._answers) - 1)]
        self.requests.append(request)
        return answer(json.loads(request.content))

    def body(self, index: int = -1) -> dict[str, Any]:
        return dict(json.loads(self.requests[index].content))

    def conversation(self, **options: Any) -> Conversation:
        return Conversation(
            base_url="http://server/v1/",
            model="default",
            api_key="secret",
            options={"max_tokens": 9},
            transport=httpx.MockTransport(self),
            **options,
        )


def exchange(conversation: Conversation, text: str) -> tuple[str, TurnCost]:
    *pieces, cost = conversation.send(text)
    assert isinstance(cost, TurnCost)
    return "".join(piece for piece in pieces if isinstance(piece, str)), cost


def test_a_turn_streams_its_reply_and_shows_its_cost() -> None:
    server = Server()
    text, cost = exchange(server.conversation(), "hi")
    assert text == "Hello"
    assert cost.first_token_s is not None
    line = cost.line()
    assert line.startswith("reused 40 of 50 prompt tokens, first token after ")
    assert line.endswith(" s, 2 generated")


def test_the_request_has_openais_format() -> None:
    server = Server()
    exchange(server.conversation(system="Be brief."), "hi")
    [request] = server.requests
    assert str(request.url) == "http://server/v1/chat/completions"
    assert request.headers["authorization"] == "Bearer secret"
    assert server.body() == {
        "model": "default",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "hi"},
        ],
        "stream": True,
        "stream_options": {"include_usage": True},
        "prefill_progress": True,
        "max_tokens": 9,
    }


def delta(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields}]}


def called(name: str | None, arguments: str) -> dict[str, Any]:
    return delta(tool_calls=[{"index": 0, "function": {"name": name, "arguments": arguments}}])


def thoughtful(_body: dict[str, Any]) -> httpx.Response:
    return stream(
        {"choices": [], "prefill_progress": {"done_tokens": 5, "prompt_tokens": 50}},
        delta(role="assistant", content=""),
        delta(reasoning_content="Hm, "),
        delta(reasoning_content="[b]two[/b]."),
        delta(content="2"),
        called("add", ""),
        called(None, '{"a": 1}'),
        {"choices": [], "usage": USAGE},
    )


def test_a_turn_separates_progress_reasoning_and_tool_calls() -> None:
    *parts, cost = Server(thoughtful).conversation().send("hi")
    assert parts == [
        PrefillProgress(5, 50),
        Reasoning("Hm, "),
        Reasoning("[b]two[/b]."),
        "2",
        ToolCallText("add", ""),
        ToolCallText("", '{"a": 1}'),
    ]
    assert isinstance(cost, TurnCost)


def test_reasoning_is_not_sent_back() -> None:
    server = Server(thoughtful, hello)
    conversation = server.conversation()
    exchange(conversation, "one")
    exchange(conversation, "two")
    assert server.body()["messages"] == [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "two"},
    ]


def test_progress_does_not_count_as_the_first_token() -> None:
    reading = {"choices": [], "prefill_progress": {"done_tokens": 5, "prompt_tokens": 50}}
    _, cost = exchange(Server(lambda _: stream(reading)).conversation(), "hi")
    assert cost.first_token_s is None


def test_the_history_grows_turn_by_turn() -> None:
    server = Server()
    conversation = server.conversation()
    exchange(conversation, "one")
    exchange(conversation, "two")
    assert server.body()["messages"] == [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "two"},
    ]


def test_a_new_conversation_keeps_only_the_system_prompt() -> None:
    server = Server()
    conversation = server.conversation(system="Be brief.")
    exchange(conversation, "one")
    conversation.start_over()
    exchange(conversation, "two")
    assert [message["role"] for message in server.body()["messages"]] == ["system", "user"]


def unreachable(_body: dict[str, Any]) -> httpx.Response:
    raise httpx.ConnectError("connection refused")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (unreachable, "Start one with `rekindle serve`"),
        (lambda _: httpx.Response(400, json={"error": {"message": "too hot"}}), "too hot"),
        (lambda _: httpx.Response(502, text="<html>"), "the server answered 502"),
        (lambda _: httpx.Response(500, json=["?"]), "the server answered 500"),
        (lambda _: stream("Hel", {"error": {"message": "it died"}}), "it died"),
        (lambda _: stream("Hel", done=False), "ended early"),
        (lambda _: httpx.Response(200, text="<html>welcome</html>"), "not an OpenAI-compatible"),
        (lambda _: httpx.Response(200, text="data: {nonsense\n\n"), "not a chat completion chunk"),
        (lambda _: httpx.Response(200, text="data: 3\n\n"), "not a chat completion chunk"),
    ],
)
def test_a_failed_turn_says_why_and_leaves_the_history_unchanged(
    answer: Answer, message: str
) -> None:
    conversation = Server(hello, answer, hello).conversation()
    exchange(conversation, "one")
    before = conversation.messages
    with pytest.raises(RekindleError, match=message):
        exchange(conversation, "two")
    assert conversation.messages == before
    assert exchange(conversation, "two again")[0] == "Hello"


def test_an_invalid_url_is_reported_as_a_failure() -> None:
    conversation = Conversation(base_url="http://[", model="m", api_key="k", options={})
    with pytest.raises(RekindleError, match="no server answers at"):
        exchange(conversation, "hi")


def test_a_reply_without_text_or_usage_still_has_a_cost_line() -> None:
    text, cost = exchange(Server(lambda _: stream({"choices": []})).conversation(), "hi")
    assert text == ""
    assert cost.line() == "reused 0 of 0 prompt tokens, first token after no token, 0 generated"


def talk(monkeypatch: pytest.MonkeyPatch, server: Server, *lines: str | type[Exception]) -> str:
    """The output for a person who types these lines and then leaves."""
    typed = iter(lines)

    def read(*_: Any, **__: Any) -> str:
        line = next(typed, EOFError)
        if isinstance(line, str):
            return line
        raise line

    console = Console(file=io.StringIO(), width=200, highlight=False)
    monkeypatch.setattr(console, "input", read)
    converse(server.conversation(), console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_conversation_shows_replies_and_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()
    shown = talk(monkeypatch, server, "one", "", "  two  ", "/quit", "never sent")
    assert shown.count("Hello") == 2
    assert shown.count("reused 40 of 50 prompt tokens") == 2
    assert len(server.requests) == 2
    assert server.body()["messages"][-1]["content"] == "two"


@pytest.mark.parametrize("command", ["/new", "/clear", "/CLEAR"])
def test_a_command_starts_a_new_conversation(monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    server = Server()
    assert "This is a new conversation." in talk(monkeypatch, server, "one", command, "two")
    assert len(server.body()["messages"]) == 1


@pytest.mark.parametrize("command", ["/quit", "/exit", " /exit ", "/Quit"])
def test_a_command_ends_the_chat(monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    server = Server()
    talk(monkeypatch, server, command, "never sent")
    assert server.requests == []


def test_help_lists_every_command(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()
    shown = talk(monkeypatch, server, "/help")
    assert all(command in shown for command in ("/help", "/new", "/clear", "/exit", "/quit", "//"))
    assert server.requests == []


@pytest.mark.parametrize("typed", ["/halp", "/", "/save as x", "/[bold]"])
def test_an_unknown_command_gets_a_hint_and_is_not_sent(
    monkeypatch: pytest.MonkeyPatch, typed: str
) -> None:
    server = Server()
    assert f"There is no command {typed.split()[0]}; /help lists the commands" in talk(
        monkeypatch, server, typed
    )
    assert server.requests == []


@pytest.mark.parametrize(
    ("typed", "sent"),
    [("//help", "/help"), ("/etc/hosts is what?", "/etc/hosts is what?"), ("a /help", "a /help")],
)
def test_a_line_that_is_not_a_command_is_sent(
    monkeypatch: pytest.MonkeyPatch, typed: str, sent: str
) -> None:
    server = Server()
    talk(monkeypatch, server, typed)
    assert server.body()["messages"][-1]["content"] == sent


def test_an_error_is_shown_and_the_conversation_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    odd = "the file [/tmp/x] is odd [bold]"
    server = Server(lambda _: httpx.Response(400, json={"error": {"message": odd}}), hello)
    shown = talk(monkeypatch, server, "one", "two")
    assert f"error: {odd}" in shown
    assert "Hello" in shown


def test_text_of_a_model_is_shown_without_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(lambda _: stream("[bold]not bold[/] ", "[/x] " + "word " * 60))
    shown = talk(monkeypatch, server, "one")
    assert "[bold]not bold[/] [/x] " + "word " * 60 in shown


def test_reasoning_and_calls_are_separated_from_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = talk(monkeypatch, Server(thoughtful), "one")
    assert 'Hm, [b]two[/b].\n\n2\n\ncalls add {"a": 1}\n' in shown


def terminal() -> Console:
    return Console(file=io.StringIO(), width=80, force_terminal=True, color_system="standard")


def test_a_terminal_shows_prefill_progress_until_the_reply_begins() -> None:
    console = terminal()
    with Screen(console) as screen:
        screen.show(PrefillProgress(512, 2048))
        status = screen.status
        assert status is not None
        assert status.status == "prefill: 512 of 2048 prompt tokens"
        screen.show("Hello")
        assert screen.status is None


def test_a_terminal_shows_reasoning_dimmed() -> None:
    console = terminal()
    with Screen(console) as screen:
        screen.show(Reasoning("Hm"))
        screen.show("Hello")
    assert isinstance(console.file, io.StringIO)
    written = console.file.getvalue()
    assert "\x1b[2mHm" in written
    assert "\x1b[2mHello" not in written


def test_a_failure_removes_the_status_line() -> None:
    screen = Screen(terminal())
    with pytest.raises(RekindleError), screen:
        raise RekindleError("gone")
    assert screen.status is None


def test_an_interrupt_stops_only_the_reply(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(_body: dict[str, Any]) -> httpx.Response:
        raise KeyboardInterrupt

    server = Server(interrupted, hello)
    shown = talk(monkeypatch, server, "one", "two")
    assert "stopped" in shown
    assert "Hello" in shown
    assert len(server.body()["messages"]) == 1


def test_an_interrupt_at_the_prompt_ends_the_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()

    def interrupt(*_: Any, **__: Any) -> str:
        raise KeyboardInterrupt

    console = Console(file=io.StringIO())
    monkeypatch.setattr(console, "input", interrupt)
    converse(server.conversation(), console)
    assert server.requests == []
