"""Parts of a reply are written as they come, and all else as before."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rekindle.http.responses import BodyWriter
from rekindle.protocol.events import Started
from tests.api.live import live, soon
from tests.api.scripted import Front, ScriptedRuntime, Step, delta, finished, reasoning, reply

LEAD = ["."] * 50  # of texts, until when the stream's task waits for the next
HELLO = {"messages": [{"role": "user", "content": "hello"}], "stream": True}


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What is written without a task's turn."""
    parts: list[bytes] = []
    write = BodyWriter.write

    def record(self: BodyWriter, part: bytes) -> None:
        parts.append(part)
        write(self, part)

    monkeypatch.setattr(BodyWriter, "write", record)
    return parts


def streamed(path: str, script: list[Step], **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream, from a real server."""
    with live(Front(ScriptedRuntime(script))) as server, server.client() as client:
        answer = client.post(path, json={**HELLO, **fields})
        again = client.post(path, json={**HELLO, **fields})  # on the same connection
    assert answer.status_code == again.status_code == 200
    lines = [line[6:] for line in answer.text.split("\n") if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def text_of(events: list[dict[str, Any]]) -> str:
    choices = (event["choices"] for event in events if event.get("choices"))
    return "".join(each[0]["delta"].get("content") or "" for each in choices)


def test_parts_are_written_without_waking_the_streams_task(written: list[bytes]) -> None:
    texts = [f"{number} " for number in range(100)]
    assert text_of(streamed("/v1/chat/completions", reply(*texts))) == "".join(texts)
    assert len(written) > 100  # of 198: the first of each has the headers with it


def test_a_chunk_is_the_same_however_it_is_written(written: list[bytes]) -> None:
    texts = ["plain", 'a "quote"', "naïve\u2028line", "\n\t", "🙂"]
    script = reply(*LEAD, *texts)
    front = Front(ScriptedRuntime(script)).chat(stream=True).text  # nothing but ASGI's `send`
    lines = [json.loads(line[6:]) for line in front.split("\n") if line.startswith("data: {")]
    events = streamed("/v1/chat/completions", script)
    assert any("naïve".encode() in part for part in written)
    own = ("id", "created")
    assert [{**each, **dict.fromkeys(own)} for each in events] == [
        {**each, **dict.fromkeys(own)} for each in lines
    ]


def test_a_client_that_does_not_read_gets_all_in_order_when_it_does(written: list[bytes]) -> None:
    texts = [f"<{number}>{'x' * 50_000}" for number in range(300)]  # more than sockets hold
    with live(Front(ScriptedRuntime(reply(*texts)))) as server:
        body = json.dumps(HELLO).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        head += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
        with server.raw(head + body) as sock:
            soon(lambda: server.runtime.open_turns == 0 and bool(server.runtime.requests))
            found = bytearray()
            while part := sock.recv(1 << 16):
                found += part
    assert 0 < len(written) < len(texts)
    places = [found.find(b'"<%d>x' % number) for number in range(len(texts))]
    assert places == sorted(places)
    assert -1 not in places
    assert found.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def test_a_part_that_has_nothing_to_show_does_not_end_the_stream(written: list[bytes]) -> None:
    parts = [*map(delta, LEAD), delta("a"), reasoning("hm"), reasoning("so"), delta("b")]
    script: list[Step] = [Started(0, 10, 0), *parts, finished()]
    hidden = {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}
    fields = {"model": "tiny", "max_tokens": 2048, "thinking": hidden}
    events = streamed("/v1/messages", script, **fields)
    assert b"" in written
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert [each["text"] for each in deltas if "text" in each] == [*LEAD, "a", "b"]
    assert events[-1]["type"] == "message_stop"


def test_a_part_that_cannot_be_written_ends_its_own_stream_alone(written: list[bytes]) -> None:
    script = reply(*LEAD, "a", "\ud800", "b")  # no text has such a character
    events = streamed("/v1/chat/completions", script)
    assert events[-1]["error"]["message"] == "an unexpected error ended this stream"
    assert text_of(events) == "".join(LEAD) + "a"
    assert written
