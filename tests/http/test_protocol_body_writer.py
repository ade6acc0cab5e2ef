"""Chunks written directly to the connection look the same as chunks sent through ASGI."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rekindle.http.protocol import BodyWriter
from rekindle.protocol.events import Started
from tests.api.live import live, soon
from tests.api.scripted import Front, ScriptedRuntime, Step, delta, finished, reasoning, reply

LEAD = ["."] * 50  # enough texts for the stream's task to be waiting
HELLO = {"messages": [{"role": "user", "content": "hello"}], "stream": True}


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The chunks that are written directly."""
    parts: list[bytes] = []
    write = BodyWriter.write

    def record(self: BodyWriter, part: bytes) -> None:
        parts.append(part)
        write(self, part)

    monkeypatch.setattr(BodyWriter, "write", record)
    return parts


def streamed(path: str, script: list[Step], **fields: Any) -> list[dict[str, Any]]:
    """Return the events of a stream from a real server."""
    with live(Front(ScriptedRuntime(script))) as server, server.client() as client:
        answer = client.post(path, json={**HELLO, **fields})
        again = client.post(path, json={**HELLO, **fields})  # on the same connection
    assert answer.status_code == again.status_code == 200
    lines = [line[6:] for line in answer.text.split("\n") if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def text_of(events: list[dict[str, Any]]) -> str:
    choices = (event["choices"] for event in events if event.get("choices"))
    return "".join(each[0]["delta"].get("content") or "" for each in choices)


def test_chunks_are_written_without_waking_the_streams_task(written: list[bytes]) -> None:
    texts = [f"{number} " for number in range(100)]
    assert text_of(streamed("/v1/chat/completions", reply(*texts))) == "".join(texts)
    assert len(written) > 100  # of 198, because the first chunks are sent with the headers


def test_a_chunk_is_the_same_either_way(written: list[bytes]) -> None:
    texts = ["plain", 'a "quote"', "naïve\u2028line", "\n\t", "🙂"]
    script = reply(*LEAD, *texts)
    front = Front(ScriptedRuntime(script)).chat(stream=True).text  # only through ASGI
    lines = [json.loads(line[6:]) for line in front.split("\n") if line.startswith("data: {")]
    events = streamed("/v1/chat/completions", script)
    assert any("naïve".encode() in part for part in written)
    own = ("id", "created")
    assert [{**each, **dict.fromkeys(own)} for each in events] == [
        {**each, **dict.fromkeys(own)} for each in lines
    ]


def test_a_slow_client_gets_all_chunks_in_order(written: list[bytes]) -> None:
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


def test_an_empty_chunk_does_not_end_the_stream(written: list[bytes]) -> None:
    parts = [*map(delta, LEAD), delta("a"), reasoning("hm"), reasoning("so"), delta("b")]
    script: list[Step] = [Started(0, 10, 0), *parts, finished()]
    hidden = {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}
    fields = {"model": "tiny", "max_tokens": 2048, "thinking": hidden}
    events = streamed("/v1/messages", script, **fields)
    assert b"" in written
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert [each["text"] for each in deltas if "text" in each] == [*LEAD, "a", "b"]
    assert events[-1]["type"] == "message_stop"


def test_a_chunk_that_cannot_be_serialised_ends_only_its_own_stream(written: list[bytes]) -> None:
    script = reply(*LEAD, "a", "\ud800", "b")  # not a valid character
    events = streamed("/v1/chat/completions", script)
    assert events[-1]["error"]["message"] == "an unexpected error ended this stream"
    assert text_of(events) == "".join(LEAD) + "a"
    assert written
