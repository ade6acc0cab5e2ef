"""Standard readers can read our server-sent events, and our reader survives any bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from typing import Any

import httpx
import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from openai._streaming import SSEDecoder

from rekindle import event_stream
from rekindle.bench.client import BenchFailed, Recording
from rekindle.cli.chat import Conversation, TurnCost
from rekindle.errors import RekindleError
from rekindle.event_stream import EventReader, EventTooLarge
from rekindle.http.responses import SSE_DONE, sse_comment, sse_data, sse_event
from tests.support.rounds import rounds

EXAMPLES = settings(max_examples=rounds(60, 2000), derandomize=True, database=None, deadline=None)
ODD = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\rh\ni\r\nj\x00k: data: x"
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
# Bytes that often look like events.
PIECES = st.sampled_from(
    [b"data:", b"data: ", b"event: x\n", b": c\n", b"\n", b"\r", b"\r\n", b"\n\n", b"[DONE]",
     b"{", b"}", b'{"choices":[{"delta":{"content":"x"}}]}', b'{"choices":[3]}', b"[[[[",
     b'{"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":1}}', b'{"usage":3}',
     b'{"choices":[{"delta":{"tool_calls":[3]}}]}', b'{"choices":[{"delta":[]}]}', b"null",
     b'{"choices":[],"usage":{"prompt_tokens_details":[]}}', b"\xff\xfe", b"\xe2\x80\xa8",
     b'{"choices":[],"prefill_progress":7}', b'{"error":4}', b"[" * 100_000]
)  # fmt: skip
EVENTS = PIECES.map(lambda piece: b"data: " + piece + b"\n\n")
STREAMS = st.lists(EVENTS | PIECES | st.binary(max_size=20), max_size=12)


def cut(content: bytes, places: list[int]) -> list[bytes]:
    """Split the bytes at these positions."""
    edges = [0, *sorted(place % (len(content) + 1) for place in places), len(content)]
    return [content[start:stop] for start, stop in pairwise(edges)]


def read(parts: list[bytes]) -> list[str]:
    reader = EventReader()
    return [data for part in parts for data in reader.feed(part)]


@EXAMPLES
@given(st.lists(TEXT, max_size=4), st.lists(st.integers(0, 10_000), max_size=6))
@example([ODD], [3, 7])
@pytest.mark.long
def test_our_events_are_read_by_openais_reader_and_by_our_own(
    texts: list[str], places: list[int]
) -> None:
    payloads = [{"text": text, text: [text]} for text in texts]
    content = sse_comment("prefill 1/2")
    for payload in payloads:
        content += sse_data(payload) + sse_event("x_cache", payload)
    content += SSE_DONE
    theirs = [(each.event, each.data) for each in SSEDecoder().iter_bytes(iter([content]))]
    expected = [each for payload in payloads for each in (payload, payload)]
    assert [orjson.loads(data) for _, data in theirs[:-1]] == expected
    assert [event for event, _ in theirs[:-1]] == [None, "x_cache"] * len(payloads)
    assert theirs[-1] == (None, "[DONE]")
    assert read(cut(content, places)) == [data for _, data in theirs]


@EXAMPLES
@given(TEXT)
@example(ODD)
@pytest.mark.long
def test_our_events_are_one_line_for_clients_that_split_lines_differently(text: str) -> None:
    """httpx and libraries based on it split lines like Python's strings."""
    assert sse_data({"text": text}).decode().splitlines()[1:] == [""]


@EXAMPLES
@given(STREAMS, st.lists(st.integers(0, 10_000), max_size=6))
@pytest.mark.long
def test_a_stream_can_be_split_anywhere(pieces: list[bytes], places: list[int]) -> None:
    content = b"".join(pieces)
    whole = read([content])
    assert read(cut(content, places)) == whole
    assert (
        read([content[at : at + 1] for at in range(len(content))][:5000])
        == whole[: len(read([content[:5000]]))]
    )


def answering(content: bytes) -> Any:
    def answer(_request: httpx.Request) -> httpx.Response:
        parts = cut(content, [7, 50, 51])
        return httpx.Response(200, stream=Parts(parts))

    return answer


class Parts(httpx.SyncByteStream, httpx.AsyncByteStream):
    def __init__(self, parts: list[bytes]) -> None:
        self._parts = parts

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._parts)

    async def __aiter__(self) -> Any:
        for part in self._parts:
            yield part


@EXAMPLES
@given(STREAMS)
@pytest.mark.long
def test_rekindle_chat_survives_any_server(pieces: list[bytes]) -> None:
    transport = httpx.MockTransport(answering(b"".join(pieces)))
    conversation = Conversation("http://x/v1", "m", "k", {}, transport=transport)
    with suppress(RekindleError):
        [part.line() if isinstance(part, TurnCost) else part for part in conversation.send("hi")]
    assert len(conversation.messages) in (0, 2)


@EXAMPLES
@given(STREAMS)
@pytest.mark.long
def test_the_bench_client_survives_any_server(pieces: list[bytes]) -> None:
    recording = Recording(sent_s=0.0)
    reader = EventReader()
    with suppress(BenchFailed):
        for data in reader.feed(b"".join(pieces)):
            recording.take(data, 1.0)
        recording.finish(2.0)


def test_a_reply_with_unusual_characters_arrives_unchanged() -> None:
    """This also works with a server that does not escape them."""
    chunk = orjson.dumps({"choices": [{"delta": {"content": ODD}}]})
    content = b"data: " + chunk + b"\n\ndata: [DONE]\n\n"
    transport = httpx.MockTransport(answering(content))
    conversation = Conversation("http://x/v1", "m", "k", {}, transport=transport)
    list(conversation.send("hi"))
    assert conversation.messages[-1]["content"] == ODD


@pytest.mark.parametrize(
    ("content", "data"),
    [
        (b"data: a\ndata: b\n\n", ["a\nb"]),
        (b"data:a\r\rdata:  b\r\n\r\n", ["a", " b"]),
        (b": comment\nid: 3\nretry: 1\ndata: a\n\n", ["a"]),
        (b"event: x\n\n", []),
        (b"data\n\ndata:\n\n", ["", ""]),
        (b"data: not ended\n", []),
        (b"datum: a\n\n", []),
    ],
)
def test_events_are_parsed_as_the_standard_says(content: bytes, data: list[str]) -> None:
    assert read([content]) == data


def test_an_endless_event_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "MAX_EVENT_BYTES", 1000)
    assert len(read([b"data: " + b"x" * 500 + b"\n\n"] * 9)) == 9
    with pytest.raises(EventTooLarge):
        read([b"data: " + b"x" * 500] * 9)
