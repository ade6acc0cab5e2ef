"""What comes before a request: headers one byte at a time, without an end, or not at all."""

from __future__ import annotations

import select
import socket
import time

import pytest

from rekindle.http import protocol as http_protocol
from rekindle.http.middleware import MOST_HEADER_BYTES
from rekindle.protocol.events import Started
from tests.api.live import PATIENCE_S, Live, live, soon
from tests.api.scripted import Front, Pause, ScriptedRuntime

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
STREAM = b'{"messages": [{"role": "user", "content": "hi"}], "stream": true, "n": 1}'


LITTLE_S = 0.3


def drip(sock: socket.socket, byte: bytes) -> bytes:
    """Send a byte again and again until the server has had enough; returns what it said."""
    deadline = time.monotonic() + PATIENCE_S
    while not select.select([sock], [], [], 0.02)[0]:
        assert time.monotonic() < deadline, "the server takes headers for ever"
        try:
            sock.sendall(byte)
        except (BrokenPipeError, ConnectionResetError):
            break
    return received(sock)


def received(sock: socket.socket) -> bytes:
    """Everything up to the end of the connection."""
    found = b""
    try:
        while part := sock.recv(65536):
            found += part
    except ConnectionResetError:
        pass
    return found


def answered(sock: socket.socket, status: int) -> None:
    """Read one answer, whose body ends with the bracket that its first began with."""
    found = b""
    while not found.rstrip().endswith(b"}"):
        part = sock.recv(65536)
        assert part, found
        found += part
    assert found.startswith(b"HTTP/1.1 %d " % status)


def is_over(server: Live) -> bool:
    return not server.connections()


def test_headers_one_byte_at_a_time_are_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    with live(Front()) as server, server.raw(HEALTH + b"\r\n") as sock:
        answered(sock, 200)
        monkeypatch.setattr(http_protocol, "HEADERS_S", LITTLE_S)
        sock.sendall(HEALTH + b"X-Slow: ")
        answer = drip(sock, b"a")
        assert answer.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
        assert b"x-request-id: req_" in answer
        assert b'"code":"headers_too_slow"' in answer
        soon(lambda: is_over(server))


@pytest.mark.parametrize("first", [b"", HEALTH + b"\r\n"], ids=["at first", "after a request"])
def test_a_connection_without_a_request_is_closed(
    first: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    with live(Front()) as server:
        if not first:
            monkeypatch.setattr(http_protocol, "HEADERS_S", LITTLE_S)
        with server.raw(first) as sock:
            if first:
                answered(sock, 200)
                monkeypatch.setattr(http_protocol, "HEADERS_S", LITTLE_S)
            assert drip(sock, b"\r\n") == b""
            soon(lambda: is_over(server))


def test_a_body_that_goes_on_after_its_refusal_is_cut_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999\r\n"
    with live(Front()) as server, server.raw(head + b"Content-Type: text/plain\r\n\r\n") as sock:
        answered(sock, 415)
        monkeypatch.setattr(http_protocol, "HEADERS_S", LITTLE_S)
        assert drip(sock, b"x") == b""
        soon(lambda: is_over(server))


def test_headers_without_an_end_are_cut_off() -> None:
    with live(Front()) as server, server.raw(HEALTH + b"X-Long: ") as sock:
        sent = 0
        while not select.select([sock], [], [], 0)[0] and sent < 100 * MOST_HEADER_BYTES:
            try:
                sent += sock.send(b"a" * 16_384)
            except (BrokenPipeError, ConnectionResetError):
                break
        assert sent < 100 * MOST_HEADER_BYTES
        soon(lambda: is_over(server))
        with server.client() as client:
            assert client.get("/health").status_code == 200


def test_large_headers_are_told_so_before_they_end() -> None:
    with live(Front()) as server:
        with server.raw(HEALTH + b"X-Long: " + b"a" * MOST_HEADER_BYTES) as sock:
            answer = received(sock)
        assert answer.startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")
        assert b'"code":"headers_too_large"' in answer


def test_a_request_that_is_being_answered_has_no_deadline_for_headers() -> None:
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(STREAM)}"
    content = f"{head}\r\nContent-Type: application/json\r\n\r\n".encode() + STREAM
    with live(Front(ScriptedRuntime([Started(0, 1, 0), Pause()]))) as server:
        with server.raw(content):
            soon(lambda: server.runtime.open_turns == 1)
            [connection] = server.connections()
            assert connection._deadline is None
        soon(server.is_idle)


def test_requests_on_one_connection_are_each_in_time() -> None:
    with live(Front()) as server, server.raw(b"") as sock:
        for _ in range(3):
            sock.sendall(HEALTH + b"\r\n")
            answered(sock, 200)
