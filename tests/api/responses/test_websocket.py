"""The Responses API over a WebSocket, with OpenAI's client and with a plain one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from rekindle.api.responses import websocket
from rekindle.http import body as http_body
from rekindle.http.body import BodyLimits
from rekindle.protocol.events import Started
from tests.api.live import PATIENCE_S, Live, live, soon
from tests.api.responses.asking import Stepwise, runtime_of
from tests.api.responses.published import check_event
from tests.api.scripted import Front, Pause, Script, delta, failed, finished, reply

CREATE: dict[str, Any] = {"type": "response.create", "model": "tiny", "input": "hello"}
UNSTORED = {**CREATE, "store": False}
ENDLESS: Script = [Started(0, 10, 0), delta("one"), Pause()]
DIED: Script = [Started(0, 10, 0), delta("x"), failed(503, "server_error", "server_error", "died")]
ENDS = ("response.completed", "response.incomplete", "response.failed", "error")


@contextmanager
def server_of(*scripts: Script, **settings: Any) -> Iterator[Live]:
    with live(Front(runtime_of(*scripts), **settings)) as server:
        yield server
        soon(server.is_idle)


@contextmanager
def socket_of(server: Live, **headers: str) -> Iterator[ClientConnection]:
    url = f"ws://127.0.0.1:{server.port}/v1/responses"
    with connect(url, additional_headers=headers, open_timeout=PATIENCE_S) as opened:
        yield opened


def told(opened: ClientConnection) -> dict[str, Any]:
    return dict(json.loads(opened.recv(timeout=PATIENCE_S)))


def asked(opened: ClientConnection, **fields: Any) -> list[dict[str, Any]]:
    """The events of one response, or the error instead of it."""
    opened.send(json.dumps({**CREATE, **fields}))
    found = [told(opened)]
    while found[-1]["type"] not in ENDS:
        found.append(told(opened))
    if found[-1]["type"] != "error":
        for event in found:
            check_event(event)
        assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def answered(opened: ClientConnection, **fields: Any) -> dict[str, Any]:
    return dict(asked(opened, **fields)[-1]["response"])


def refused(opened: ClientConnection, **fields: Any) -> dict[str, Any]:
    [event] = asked(opened, **fields)
    assert event["type"] == "error"
    assert event["error"].keys() == {"message", "type", "param", "code"}
    return event


def contents(server: Live, number: int) -> list[Any]:
    return [each["content"] for each in server.runtime.requests[number].messages or ()]


# OpenAI's client opens its connections in a way that newer versions of websockets do not like.
@pytest.mark.filterwarnings("ignore:connect\\(\\) must be used:DeprecationWarning")
def test_the_clients_own_connection_creates_responses_one_after_the_other() -> None:
    with (
        server_of(reply("Hel", "lo"), reply("Fine."), api_key=["secret"]) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret") as client,
        client.responses.connect() as connection,
    ):
        connection.response.create(model="tiny", input="hello", store=False)
        events = list[Any]()
        for event in connection:
            events.append(event)
            if event.type == "response.completed":
                break
        texts = [each.delta for each in events if each.type == "response.output_text.delta"]
        assert texts == ["Hel", "lo"]
        first = events[-1].response
        connection.response.create(
            model="tiny", input="And you?", store=False, previous_response_id=first.id
        )
        last = next(event for event in connection if event.type == "response.completed")
        assert last.response.output_text == "Fine."
        assert last.response.previous_response_id == first.id
    assert contents(server, 1) == ["hello", "Hello", "And you?"]


def test_an_unstored_response_is_known_on_its_connection_alone() -> None:
    with server_of() as server:
        with socket_of(server) as opened:
            first = answered(opened, store=False)
            second = answered(opened, store=False, previous_response_id=first["id"])
            # A lane remembers its last response.
            again = refused(opened, store=False, previous_response_id=first["id"])
            assert again["status"] == 400
            assert again["error"]["code"] == "previous_response_not_found"
        with socket_of(server) as opened:
            lost = refused(opened, store=False, previous_response_id=second["id"])
            assert lost["error"]["code"] == "previous_response_not_found"
            assert answered(opened, store=False)["status"] == "completed"
    assert contents(server, 1) == ["hello", "Hello", "hello"]
    names = server.runtime.requests[1].names
    assert names is None, "its state has no name, and is found by its tokens"


def test_a_stored_response_can_be_continued_on_another_connection() -> None:
    with server_of() as server:
        with socket_of(server) as opened:
            first = answered(opened)
        with socket_of(server) as opened:
            answered(opened, previous_response_id=first["id"])
    assert contents(server, 1) == ["hello", "Hello", "hello"]


@pytest.mark.parametrize("fails", ["in the model", "before it"])
def test_a_continuation_that_fails_forgets_the_response(fails: str) -> None:
    output = {"type": "function_call_output", "call_id": "call_x", "output": "?"}
    wrong = {} if fails == "in the model" else {"input": [output]}
    with server_of(reply("Hello"), DIED) as server, socket_of(server) as opened:
        first = answered(opened, store=False)
        *_, event = asked(opened, store=False, previous_response_id=first["id"], **wrong)
        assert event["type"] == ("response.failed" if fails == "in the model" else "error")
        lost = refused(opened, store=False, previous_response_id=first["id"])
        assert lost["error"]["code"] == "previous_response_not_found"


def test_lanes_are_answered_concurrently_and_name_their_events() -> None:
    with server_of(ENDLESS, reply("Fine.")) as server, socket_of(server) as opened:
        opened.send(json.dumps({**UNSTORED, "stream_id": "slow"}))
        while (event := told(opened))["type"] != "response.output_text.delta":
            assert event["stream_id"] == "slow"
        events = asked(opened, store=False, stream_id="fast")
        assert {each["stream_id"] for each in events} == {"fast"}
        assert events[-1]["response"]["output"][0]["content"][0]["text"] == "Fine."


def test_the_number_of_lanes_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket, "MAX_LANES", 2)
    with server_of() as server, socket_of(server) as opened:
        for name in ("a", "b"):
            answered(opened, store=False, stream_id=name)
        refusal = refused(opened, store=False, stream_id="c")
        assert refusal["error"]["code"] == "websocket_stream_limit_reached"
        assert refusal["stream_id"] == "c"
        answered(opened, store=False, stream_id="a")


def test_a_client_that_leaves_cancels_what_is_computed() -> None:
    with server_of(ENDLESS) as server:
        with socket_of(server) as opened:
            opened.send(json.dumps(UNSTORED))
            while told(opened)["type"] != "response.output_text.delta":
                pass
        soon(lambda: server.runtime.cancelled_turns == 1)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("{", "not valid JSON"),
        ("[]", "`type` response.create"),
        (json.dumps({**CREATE, "type": "response.cancel"}), "`type` response.create"),
        (json.dumps({**CREATE, "background": True}), "leave `background` out"),
        (json.dumps({**CREATE, "stream_id": 1}), "`stream_id` takes a string"),
        (json.dumps({**CREATE, "input": 1}), "`input` takes a string, or a list of items"),
        (json.dumps({**CREATE, "model": "gpt-7"}), "is not served here"),
        (b"\x00", "Send JSON as text"),
    ],
)
def test_a_wrong_message_is_answered_with_an_error(message: str | bytes, words: str) -> None:
    with server_of() as server, socket_of(server) as opened:
        opened.send(message)
        event = told(opened)
        assert event["type"] == "error"
        assert event["status"] in (400, 404)
        assert words in event["error"]["message"]
        assert answered(opened)["status"] == "completed", "the connection stays open"


def test_a_message_beyond_the_limit_of_requests_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_body, "LIMITS", BodyLimits(body_bytes=10_000))
    with server_of() as server, socket_of(server) as opened:
        refusal = refused(opened, input="x" * 10_000)
        assert (refusal["status"], refusal["error"]["code"]) == (413, "body_too_large")


def test_messages_wait_while_those_before_them_take_too_much_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(websocket, "LIMITS", BodyLimits(body_bytes=150))
    script: Script = [Started(0, 10, 0), Pause(), delta("x"), finished()]
    runtime = Stepwise(script, reply("Fine."))
    with live(Front(runtime)) as server, socket_of(server) as opened:
        for name in ("slow", "fast"):
            opened.send(json.dumps({**UNSTORED, "stream_id": name}))
        assert [told(opened)["stream_id"] for _ in range(2)] == ["slow", "slow"]
        server.call(runtime.may_continue.set)
        names = list[str]()
        while names.count("fast") < 2:
            names.append(told(opened)["stream_id"])
        assert names[:-2] == ["slow"] * (len(names) - 2), "the second one waits for the first"


@pytest.mark.parametrize("content", [",".join(["[]"] * 40_000), '"' + "x" * 100_000 + '"'])
def test_a_large_message_is_checked_before_it_is_parsed(
    monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    monkeypatch.setattr(http_body, "LIMITS", BodyLimits(punctuation=30_000))
    with server_of() as server, socket_of(server) as opened:
        opened.send(f'{{"type": "response.create", "input": "x", "metadata": [{content}]}}')
        message = told(opened)["error"]["message"]
    assert ("commas, colons" in message) == content.startswith("[")
    assert ("`metadata`" in message) == content.startswith('"')


def test_steering_is_refused_with_the_input() -> None:
    with server_of() as server, socket_of(server) as opened:
        steer = {"type": "response.steer", "previous_response_id": "resp_x", "input": "no"}
        opened.send(json.dumps(steer))
        event = told(opened)
        assert event["type"] == "response.steer.failed"
        assert event["error"]["code"] == "steering_not_supported"
        assert event["steer"] == {"previous_response_id": "resp_x", "input": "no"}


def test_a_prompt_is_prepared_without_a_reply() -> None:
    prepared: Script = [Started(0, 10, 0), finished(completion_tokens=0)]
    with server_of(prepared, reply("Yes.")) as server, socket_of(server) as opened:
        warm = answered(opened, store=False, generate=False)
        assert warm["output"] == []
        answered(opened, store=False, previous_response_id=warm["id"])
    assert server.runtime.requests[0].prepare is not None
    assert contents(server, 1) == ["hello", "hello"]


def test_a_connection_needs_a_key_and_a_path() -> None:
    with server_of(api_key=["secret"]) as server:
        with pytest.raises(InvalidStatus) as caught, socket_of(server):
            pass
        assert caught.value.response.status_code == 401
        assert b"API key" in (caught.value.response.body or b"")
        with socket_of(server, authorization="Bearer secret") as opened:
            assert answered(opened)["status"] == "completed"
        url = f"ws://127.0.0.1:{server.port}/v1/chat/completions"
        headers = {"authorization": "Bearer secret"}
        with pytest.raises(InvalidStatus) as caught, connect(url, additional_headers=headers):
            pass
        assert caught.value.response.status_code == 403


def test_a_page_of_another_origin_cannot_connect() -> None:
    """A browser opens a WebSocket to any server without asking it first."""
    with server_of(cors_origin=["https://good.example"]) as server:
        evil = {"origin": "https://evil.example"}
        with pytest.raises(InvalidStatus) as caught, socket_of(server, **evil):
            pass
        assert caught.value.response.status_code == 403
        with socket_of(server, origin="https://good.example") as opened:
            assert answered(opened)["status"] == "completed"


def test_an_old_connection_is_closed_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket, "MAX_AGE_S", 0.2)
    with server_of() as server, socket_of(server) as opened:
        event = told(opened)
        assert event["error"]["code"] == "websocket_connection_limit_reached"
        with pytest.raises(ConnectionClosed):
            told(opened)


def test_a_server_that_stops_lets_a_response_end_and_closes_the_connection() -> None:
    script: Script = [Started(0, 10, 0), delta("Hel"), *(delta(".") for _ in range(50)), finished()]
    with live(Front(runtime_of(script))) as server, socket_of(server) as opened:
        opened.send(json.dumps(UNSTORED))
        while told(opened)["type"] != "response.output_text.delta":
            pass
        server.call(server.signal)
        while (event := told(opened))["type"] not in ENDS:
            pass
        assert event["type"] == "response.completed"
        with pytest.raises(ConnectionClosed) as caught:
            told(opened)
        assert caught.value.rcvd is not None
        assert caught.value.rcvd.code == 1012
        soon(lambda: server.has_ended)


def test_an_idle_connection_does_not_delay_the_end_of_the_server() -> None:
    with live(Front(runtime_of())) as server, socket_of(server) as opened:
        server.call(server.signal)
        with pytest.raises(ConnectionClosed):
            told(opened)
        soon(lambda: server.has_ended)
