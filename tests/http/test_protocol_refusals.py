"""A client that sends its whole request before it reads sees the answer to a refused one."""

from __future__ import annotations

import contextlib
import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from rekindle.http import body as http_body
from rekindle.http import protocol as http_protocol
from rekindle.http.body import BodyLimits
from tests.api.live import PATIENCE_S, Live, live, soon
from tests.api.scripted import Front

CHAT = "/v1/chat/completions"
LARGE = 16 << 20  # more than the buffers of both sockets hold
JSON = "application/json"
# The status, and the content type, key and size with which a request gets it.
REFUSALS = [
    (401, JSON, "wrong", LARGE),
    (415, "text/plain", "right", LARGE),
    (413, JSON, "right", LARGE),
    (400, JSON, "right", LARGE // 4),  # too many values
]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Live]:
    monkeypatch.setattr(http_body, "LIMITS", BodyLimits(body_bytes=LARGE // 2))
    with live(Front(api_key=["right"])) as server:
        yield server


def head(version: str, kind: str, key: str, *more: str) -> bytes:
    lines = [
        f"POST {CHAT} HTTP/{version}",
        "Host: localhost",
        f"Content-Type: {kind}",
        f"Authorization: Bearer {key}",
        *more,
    ]
    return "\r\n".join([*lines, "", ""]).encode()


def read_all(sock: socket.socket) -> bytes:
    found = b""
    while part := sock.recv(65536):
        found += part
    return found


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize(("status", "kind", "key", "size"), REFUSALS)
def test_a_raw_client_reads_the_error_after_it_has_sent_everything(
    server: Live, status: int, kind: str, key: str, size: int, version: str
) -> None:
    more = ("Connection: close", f"Content-Length: {size}")
    with server.raw(head(version, kind, key, *more) + b"," * size) as sock:
        answer = read_all(sock)
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert b"connection: close" in answer.lower()
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
    soon(lambda: not server.connections())


def test_a_raw_client_with_a_chunked_body_reads_the_error(server: Live) -> None:
    chunk = b"100000\r\n" + b"," * (1 << 20) + b"\r\n"
    opening = head("1.1", JSON, "right", "Connection: close", "Transfer-Encoding: chunked")
    with server.raw(opening + chunk * 16 + b"0\r\n\r\n") as sock:
        assert read_all(sock).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize(("status", "kind", "key", "size"), REFUSALS)
def test_urllib_raises_the_status_and_not_a_reset(
    server: Live, status: int, kind: str, key: str, size: int
) -> None:
    headers = {"Content-Type": kind, "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(server.url + CHAT, b"," * size, headers)
    with pytest.raises(urllib.error.HTTPError) as refused, urllib.request.urlopen(request):
        pass
    with refused.value as answer:
        assert answer.code == status
        assert json.load(answer)["error"]["message"]


def test_what_is_not_http_gets_an_error_after_it_has_sent_everything(server: Live) -> None:
    with server.raw(b"NOT HTTP\r\n\r\n" + b"x" * LARGE) as sock:
        answer = read_all(sock)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b'"code":"invalid_http"' in answer
    assert answer.count(b"HTTP/1.1") == 1


def send_until_cut_off(sock: socket.socket, part: bytes) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        while True:
            sock.sendall(part)
            assert time.monotonic() < deadline_s, "the server goes on reading"


def test_a_client_that_sends_more_than_the_bound_is_cut_off(
    server: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "MAX_DISCARDED_BYTES", 1 << 20)
    more = ("Connection: close", f"Content-Length: {1 << 40}")
    with server.raw(head("1.1", JSON, "wrong", *more)) as sock:
        send_until_cut_off(sock, b"x" * (1 << 20))
        soon(lambda: not server.connections())


@pytest.mark.parametrize("limit", ["MAX_SILENCE_S", "MAX_DISCARDING_S"])
def test_a_client_that_takes_too_long_is_cut_off(
    server: Live, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(http_protocol, "MAX_SILENCE_S", 0.05)
    monkeypatch.setattr(http_protocol, limit, 0.05)
    more = ("Connection: close", f"Content-Length: {1 << 40}")
    with server.raw(head("1.1", JSON, "wrong", *more)) as sock:
        if limit == "MAX_DISCARDING_S":
            send_until_cut_off(sock, b"x")
        soon(lambda: not server.connections())
