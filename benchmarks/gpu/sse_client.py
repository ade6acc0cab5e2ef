"""Reads streamed chat completions at very low cost, with raw sockets and without parsing events.

Several processes read many streams. Each runs this file, with requests as JSON on stdin and results
as JSON on stdout.
"""

from __future__ import annotations

import json
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

FILLED, EMPTY = b'"content":"', b'"content":""'
READ_BYTES = 1 << 18
STREAMS_A_PROCESS = 16


class AskFailed(Exception):
    """The server's answer is not a successful stream."""


@dataclass(slots=True)
class Answer:
    """One stream with the arrival times of its chunks, in seconds of the machine's clock."""

    sent_s: float
    first_s: float = 0.0
    arrivals: list[tuple[float, int]] = field(
        default_factory=list
    )  # number of chunks with text so far
    tail: str = ""
    text: str = ""

    @property
    def first_ms(self) -> float:
        return (self.first_s - self.sent_s) * 1000

    @property
    def end_s(self) -> float:
        return self.arrivals[-1][0]

    @property
    def tier(self) -> str:
        """The tier from which Rekindle reused the state."""
        _, found, rest = self.tail.partition("event: x_cache")
        if not found:
            return ""
        report = json.loads(rest.partition("data: ")[2].partition("\n")[0])
        told = self.tail.partition('"first_token_time":')[
            2
        ]  # the event with the usage, before the report
        stages = json.loads(told[: told.find("}") + 1]).items() if told else ()
        spent = ", ".join(f"{stage} {spent_s * 1000:.0f}" for stage, spent_s in stages)
        found = f"{report['status']} from {report['tier']}, {report['reused_tokens']} tokens"
        return f"{found} ({spent})" if spent else found

    def chunks_by(self, moment_s: float) -> int:
        return max((count for when, count in self.arrivals if when <= moment_s), default=0)


class _Stream:
    """One connection, from its request to the end of its answer."""

    def __init__(self, port: int, body: dict[str, Any]) -> None:
        self.keeps_text = bool(body.pop("keep_text", False))
        self.delay_s = float(body.pop("delay_s", 0))
        sent = json.dumps({"stream": True, "ignore_eos": True, **body}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
        head += (
            f"Connection: close\r\nContent-Type: application/json\r\nContent-Length: {len(sent)}"
        )
        self._request = head.encode() + b"\r\n\r\n" + sent
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._parts: list[bytes] = []
        self._overlap = b""
        self._chunks = 0

    def send(self) -> None:
        self.answer = Answer(time.perf_counter())
        self.socket.sendall(self._request)
        self.socket.setblocking(False)

    def read(self) -> bool:
        """Read what has arrived. False at the end of the answer."""
        try:
            part = self.socket.recv(READ_BYTES)
        except BlockingIOError:
            return True
        now_s = time.perf_counter()
        if not part:
            self._finish()
            return False
        self._parts.append(part)
        joined = self._overlap + part
        self._chunks += joined.count(FILLED) - joined.count(EMPTY)
        self._overlap = part[1 - len(FILLED) :]
        if self._chunks > 0:
            self.answer.first_s = self.answer.first_s or now_s
            self.answer.arrivals.append((now_s, self._chunks))
        return True

    def _finish(self) -> None:
        self.socket.close()
        body = b"".join(self._parts)
        if b" 200 " not in body[:20] or b"data: [DONE]" not in body[-64:]:
            raise AskFailed(f"the server answered {body[:200]!r} … {body[-300:]!r}")
        if not self.answer.arrivals:
            raise AskFailed("the answer has no text")
        self.answer.tail = body[-4000:].decode(errors="replace")
        if self.keeps_text:
            self.answer.text = _text(body)


def _text(body: bytes) -> str:
    """The text of the stream. A transfer chunk may begin in the middle of an event."""
    found = []
    for line in _unchunked(body).split(b"\n"):
        if line.startswith(b"data: {"):
            for choice in json.loads(line[6:]).get("choices", ()):
                found.append(choice["delta"].get("content") or "")
    return "".join(found)


def _unchunked(body: bytes) -> bytes:
    head, _, rest = body.partition(b"\r\n\r\n")
    if b"chunked" not in head.lower():
        return rest
    parts, place = [], 0
    while (end := rest.find(b"\r\n", place)) >= 0:
        size = int(rest[place:end].split(b";")[0], 16)
        if not size:
            break
        parts.append(rest[end + 2 : end + 2 + size])
        place = end + 2 + size + 2
    return b"".join(parts)


def ask_all(port: int, bodies: Sequence[dict[str, Any]], timeout_s: float) -> list[Answer]:
    """Send all requests concurrently from this process."""
    streams = [_Stream(port, dict(body)) for body in bodies]
    return _drive(streams, timeout_s)


def _drive(streams: list[_Stream], timeout_s: float) -> list[Answer]:
    started_s = time.perf_counter()
    to_send = sorted(streams, key=lambda stream: -stream.delay_s)
    open_streams = len(streams)
    with selectors.DefaultSelector() as waiting:
        while open_streams:
            now_s = time.perf_counter() - started_s
            while to_send and to_send[-1].delay_s <= now_s:
                stream = to_send.pop()
                stream.send()
                waiting.register(stream.socket, selectors.EVENT_READ, stream)
            if now_s > timeout_s:
                raise AskFailed(f"no whole answer within {timeout_s:.0f} s")
            pause_s = to_send[-1].delay_s - now_s if to_send else 1.0
            for key, _events in waiting.select(timeout=min(pause_s, 1.0)):
                if not key.data.read():
                    waiting.unregister(key.fileobj)
                    open_streams -= 1
    return [stream.answer for stream in streams]


def ask(port: int, body: dict[str, Any], timeout_s: float) -> Answer:
    return ask_all(port, [body], timeout_s)[0]


def ask_many(port: int, bodies: Sequence[dict[str, Any]], timeout_s: float) -> list[Answer]:
    """Send all requests concurrently, from several processes if there are many."""
    if len(bodies) <= STREAMS_A_PROCESS // 2:
        return ask_all(port, bodies, timeout_s)
    shares = [
        bodies[at : at + STREAMS_A_PROCESS] for at in range(0, len(bodies), STREAMS_A_PROCESS)
    ]
    with _readers(shares, port, timeout_s) as readers:
        for reader in readers:
            _line(reader)  # each process has its own connections
        for reader in readers:
            assert reader.stdin
            reader.stdin.write("go\n")
            reader.stdin.flush()
        replies = [json.loads(_line(reader)) for reader in readers]
    found = []
    for reply in replies:
        if isinstance(reply, str):
            raise AskFailed(reply)
        found += [Answer(**each) for each in reply]
    return found


@contextmanager
def _readers(
    shares: Sequence[Sequence[dict[str, Any]]], port: int, timeout_s: float
) -> Iterator[list[subprocess.Popen[str]]]:
    readers = []
    try:
        for share in shares:
            reader = subprocess.Popen(
                [sys.executable, "-S", __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            readers.append(reader)
            assert reader.stdin
            reader.stdin.write(json.dumps([port, share, timeout_s]) + "\n")
            reader.stdin.flush()
        yield readers
    finally:
        for reader in readers:
            reader.kill()
            reader.wait()


def _line(reader: subprocess.Popen[str]) -> str:
    assert reader.stdout
    if not (line := reader.stdout.readline()):
        raise AskFailed("a client process ended early; see its error above")
    return line


@dataclass(frozen=True, slots=True)
class Rate:
    """Tokens per second of several streams."""

    steady: float  # while all streams were active
    whole: float  # from the first request to the last token

    @classmethod
    def of(cls, answers: Sequence[Answer], tokens_each: int) -> Rate:
        """Scale chunks to tokens, because a chunk may contain several tokens or half a
        character."""
        start_s = max(answer.first_s for answer in answers)
        stop_s = min(answer.end_s for answer in answers)
        sent_s = min(answer.sent_s for answer in answers)
        whole = len(answers) * tokens_each / (max(a.end_s for a in answers) - sent_s)
        steady = 0.0
        if stop_s > start_s:
            for answer in answers:
                chunks = answer.chunks_by(stop_s) - answer.chunks_by(start_s)
                steady += chunks * tokens_each / answer.arrivals[-1][1] / (stop_s - start_s)
        return cls(steady, whole)


def token_ms(answers: Sequence[Answer], start_s: float, stop_s: float) -> float:
    """The average time between chunks of a stream in a time span."""
    chunks = [answer.chunks_by(stop_s) - answer.chunks_by(start_s) for answer in answers]
    return (stop_s - start_s) * 1000 / max(sum(chunks) / len(chunks), 0.5)


def _serve_stdin() -> None:
    port, bodies, timeout_s = json.loads(sys.stdin.readline())
    reply: Any
    try:
        streams = [_Stream(port, body) for body in bodies]
        print("ready", flush=True)
        sys.stdin.readline()
        reply = [asdict(answer) for answer in _drive(streams, timeout_s)]
    except (AskFailed, OSError) as error:
        print("ready", flush=True)
        reply = f"{type(error).__name__}: {error}"
    print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    _serve_stdin()
