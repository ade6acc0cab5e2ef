"""Headers have to arrive completely, within the limits of size and time."""

from __future__ import annotations

import select
import socket
import time

import pytest

from rekindle.http import protocol as http_protocol
from rekindle.http.protocol import MAX_HEADER_BYTES
from rekindle.protocol.events import Started
from tests.api.live import PATIENCE_S, Live, live, soon
from tests.api.scripted import Front, Pause, ScriptedRuntime

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
STREAM = b'{"messages": [{"role": "user", "content": "hi"}], "stream": true, "n": 1}'


SHORT_S = 0.3


def drip(sock: socket.socket, byte: bytes) -> bytes:
    """Send a byte repeatedly until the server answers or closes; returns the answer."""
    deadline = time.monotonic() + PATIENCE_S
    while not select.select([sock], [], [], 0.02)[0]:
        assert time.monotonic() < deadline, "the server sets no limit"
        try:
            sock.sendall(byte)
        except (BrokenPipeError, ConnectionResetError):
            break
    return received(sock)


def received(sock: socket.socket) -> bytes:
    """Read until the connection closes."""
    found = b""
    try:
        while part := sock.recv(65536):
            found += part
    except ConnectionResetError:
        pass
    return found


def answered(sock: socket.socket, status: int) -> None:
    """Read one answer with a JSON body, and check its status."""
    found = b""
    while not found.rstrip().endswith(b"}"):
        part = sock.recv(65536)
        assert part, found
        found += part
    assert found.startswith(b"HTTP/1.1 %d " % status)


def is_over(server: Live) -> bool:
    return not server.connections()


def test_headers_sent_one_byte_at_a_time_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with live(Front()) as server, server.raw(HEALTH + b"\r\n") as sock:
        answered(sock, 200)
        monkeypatch.setattr(http_protocol, "HEADERS_TIMEOUT_S", SHORT_S)
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
            monkeypatch.setattr(http_protocol, "HEADERS_TIMEOUT_S", SHORT_S)
        with server.raw(first) as sock:
            if first:
                answered(sock, 200)
                monkeypatch.setattr(http_protocol, "HEADERS_TIMEOUT_S", SHORT_S)
            assert drip(sock, b"\r\n") == b""
            soon(lambda: is_over(server))


def test_a_body_that_continues_after_its_rejection_times_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999\r\n"
    with live(Front()) as server, server.raw(head + b"Content-Type: text/plain\r\n\r\n") as sock:
        answered(sock, 415)
        monkeypatch.setattr(http_protocol, "HEADERS_TIMEOUT_S", SHORT_S)
        assert drip(sock, b"x") == b""
        soon(lambda: is_over(server))


def test_endless_headers_are_rejected() -> None:
    with live(Front()) as server, server.raw(HEALTH + b"X-Long: ") as sock:
        sent = 0
        while not select.select([sock], [], [], 0)[0] and sent < 100 * MAX_HEADER_BYTES:
            try:
                sent += sock.send(b"a" * 16_384)
            except (BrokenPipeError, ConnectionResetError):
                break
        assert sent < 100 * MAX_HEADER_BYTES
        soon(lambda: is_over(server))
        with server.client() as client:
            assert client.get("/health").status_code == 200


def test_large_headers_get_an_answer_before_they_are_complete() -> None:
    with live(Front()) as server:
        with server.raw(HEALTH + b"X-Long: " + b"a" * MAX_HEADER_BYTES) as sock:
            answer = received(sock)
        assert answer.startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")
        assert b'"code":"headers_too_large"' in answer


def test_a_request_being_answered_has_no_header_timeout() -> None:
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(STREAM)}"
    content = f"{head}\r\nContent-Type: application/json\r\n\r\n".encode() + STREAM
    with live(Front(ScriptedRuntime([Started(0, 1, 0), Pause()]))) as server:
        with server.raw(content):
            soon(lambda: server.runtime.open_turns == 1)
            [connection] = server.connections()
            assert connection._deadline is None
        soon(server.is_idle)


def test_a_connection_serves_several_requests() -> None:
    with live(Front()) as server, server.raw(b"") as sock:
        for _ in range(3):
            sock.sendall(HEALTH + b"\r\n")
            answered(sock, 200)
