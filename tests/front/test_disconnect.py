"""A client that disconnects frees its turn at every stage, and so does a stopping server."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import tempfile
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from rekindle.http import body
from rekindle.http.body import BodyLimits
from rekindle.protocol.admin import AdminOp, AdminResult, ExportState, StateFile
from rekindle.protocol.events import Prefill, Started
from rekindle.protocol.frames import Ready
from tests.api.cache.entries import ENTRY
from tests.api.live import PATIENCE_S, Live, live, soon
from tests.api.scripted import HELLO, Front, Pause, ScriptedRuntime, Step, delta, events, reply
from tests.media.attacker import attacking

QUEUED: list[Step] = [Pause()]
IN_PREFILL: list[Step] = [Started(0, 10, 0), Prefill(0, 5, 10), Pause()]
IN_REPLY: list[Step] = [Started(0, 10, 0), delta("Hel"), Pause()]
CHAT = "/v1/chat/completions"


def request(fields: dict[str, Any], path: str = CHAT) -> bytes:
    content = json.dumps(fields).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


def reset(sock: socket.socket) -> None:
    """Close the connection with a reset."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


LEAVING = pytest.mark.parametrize("leave", [socket.socket.close, reset], ids=["close", "reset"])


@LEAVING
@pytest.mark.parametrize("turns", [1, 3])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    "script", [QUEUED, IN_PREFILL, IN_REPLY], ids=["queued", "in prefill", "in reply"]
)
def test_a_client_that_disconnects_cancels_its_turns(
    script: list[Step], stream: bool, turns: int, leave: Any
) -> None:
    with live(Front(ScriptedRuntime(script))) as server:
        sock = server.raw(request({**HELLO, "stream": stream, "n": turns}))
        soon(lambda: server.runtime.open_turns == turns)
        if stream and script is IN_REPLY:
            assert sock.recv(65536).startswith(b"HTTP/1.1 200")
        leave(sock)
        soon(server.is_idle)
        assert server.runtime.cancelled_turns == turns


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": ["a", "b"]}),
        ("/api/embed", {"input": ["a" * 100, "b"]}),  # longer than the context
        ("/api/embeddings", {"prompt": "a"}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
    ],
)
def test_a_client_that_disconnects_cancels_its_embeddings(path: str, body: dict[str, Any]) -> None:
    embedder = ScriptedRuntime([Started(0, 2, 0), Pause()], name="bert")
    ranks = path == "/v1/rerank"
    embedder.supervisor.ready = Ready(context_tokens=16, pool_tokens=0, dimensions=2, ranks=ranks)
    with live(Front(embedders=[embedder])) as server:
        sock = server.raw(request(body, path))
        soon(lambda: embedder.open_turns == 1)
        sock.close()
        soon(lambda: embedder.open_turns == 0)
        assert embedder.cancelled_turns == 1


def test_disconnecting_while_sending_the_body_starts_no_turn() -> None:
    with live(Front()) as server:
        server.raw(request(HELLO)[:-10]).close()
        soon(server.is_idle)
        assert server.runtime.requests == []


def test_disconnecting_while_an_image_is_fetched_starts_no_turn() -> None:
    front = Front(ScriptedRuntime(sees=True), media_allow=("localhost",))
    with attacking() as slow, live(front) as server:
        part = {"type": "image", "image_url": slow.url("/slow", "localhost")}
        sock = server.raw(request({"messages": [{"role": "user", "content": [part]}]}))
        soon(lambda: len(slow.requests) == 1)
        sock.close()
        soon(server.is_idle)
        assert server.runtime.requests == []


@LEAVING
@pytest.mark.parametrize("path", ["/v1/embeddings", "/api/embed", "/v1/rerank"])
def test_a_client_that_disconnects_cancels_its_embedding(path: str, leave: Any) -> None:
    embedder = ScriptedRuntime([Pause()], name="vectors")
    assert embedder.ready is not None
    embedder.ready.ranks = path == "/v1/rerank"
    fields = {"input": "hello"} if "embed" in path else {"query": "q", "documents": ["hello"]}
    with live(Front(embedders=[embedder])) as server:
        sock = server.raw(request(fields, path))
        soon(lambda: embedder.open_turns == 1)
        leave(sock)
        soon(lambda: embedder.open_turns == 0 and server.is_idle())
        assert embedder.cancelled_turns == 1


STATE = bytes(range(256)) * 40_000  # more than the buffers of a connection
IMPORT, EXPORT = "/v1/cache/import", "/v1/cache/key-1/export"
DOWNLOAD = f"GET {EXPORT} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
FILE = {"Content-Type": "application/octet-stream"}


class Transferring(ScriptedRuntime):
    """Imports and exports a file, and can be made to wait in the middle of it."""

    def __init__(self) -> None:
        super().__init__(answers=self._transfer)
        self.begun = 0
        self.may_end = threading.Event()
        self.may_end.set()

    async def admin(
        self, op: AdminOp, *, salt: bytes, admin: bool = False, groups: object = ()
    ) -> AdminResult:
        self.begun += 1
        await asyncio.to_thread(self.may_end.wait, PATIENCE_S)
        return await super().admin(op, salt=salt, admin=admin)

    def _transfer(self, op: AdminOp) -> AdminResult:
        if not isinstance(op, ExportState):
            return ENTRY
        (Path(op.folder) / "state.safetensors").write_bytes(STATE)
        return StateFile("state.safetensors", 7, len(STATE))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def transfer(server: Live) -> None:
    """Check that nothing of an earlier transfer is left: no file, no task, no slot in use."""
    soon(lambda: server.is_idle() and not list(Path(tempfile.gettempdir()).iterdir()))
    with server.client() as client:
        assert client.get(EXPORT).content == STATE
        soon(server.is_idle)  # its slot is released after the last byte
        assert client.post(IMPORT, content=STATE, headers=FILE).status_code == 200
    soon(lambda: not list(Path(tempfile.gettempdir()).iterdir()))


def upload(content: bytes) -> bytes:
    [kind] = FILE.values()
    head = f"POST {IMPORT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\n"
    return f"{head}Content-Length: {len(STATE)}\r\n\r\n".encode() + content


@LEAVING
def test_disconnecting_in_the_middle_of_an_upload_leaves_nothing(leave: Any, folder: Path) -> None:
    runtime = Transferring()
    with live(Front(runtime, disk_floor=0)) as server:
        sock = server.raw(upload(STATE[: len(STATE) // 2]))
        soon(lambda: any(file.stat().st_size for file in folder.rglob("state")))
        leave(sock)
        soon(lambda: server.is_idle() and not list(folder.iterdir()))
        assert runtime.begun == 0
        transfer(server)


@LEAVING
@pytest.mark.parametrize("sent", [upload(STATE), DOWNLOAD], ids=["import", "export"])
def test_disconnecting_while_the_runtime_works_on_a_file_leaves_nothing(
    sent: bytes, leave: Any, folder: Path
) -> None:
    runtime = Transferring()
    runtime.may_end.clear()
    with live(Front(runtime, disk_floor=0)) as server:
        sock = server.raw(sent)
        soon(lambda: runtime.begun == 1)
        leave(sock)
        runtime.may_end.set()
        transfer(server)
    assert list(folder.iterdir()) == []


@LEAVING
def test_disconnecting_in_the_middle_of_an_export_leaves_nothing(leave: Any, folder: Path) -> None:
    runtime = Transferring()
    with live(Front(runtime, disk_floor=0)) as server:
        sock = server.raw(DOWNLOAD)
        assert sock.recv(1000).startswith(b"HTTP/1.1 200")
        assert not server.is_idle(), "the rest of the file waits for the client"
        leave(sock)
        transfer(server)
    assert list(folder.iterdir()) == []


def test_disconnecting_does_not_disturb_other_clients() -> None:
    staying = reply(*(f"{number} " for number in range(200)))
    with live(Front(ScriptedRuntime(IN_REPLY, staying))) as server:
        leaving = server.raw(request({**HELLO, "stream": True}))
        soon(lambda: server.runtime.open_turns == 1)
        asked = {**HELLO, "stream": True}
        with server.client() as client, client.stream("POST", CHAT, json=asked) as response:
            lines = response.iter_lines()
            next(lines)
            leaving.close()
            assert list(lines)[-2:] == ["data: [DONE]", ""]
        soon(server.is_idle)


def test_a_client_that_reads_nothing_frees_its_turn_when_it_disconnects() -> None:
    flood: list[Step] = [Started(0, 1, 0), *(delta("x" * 60_000) for _ in range(400)), Pause()]
    with live(Front(ScriptedRuntime(flood))) as server:
        sock = server.raw(request({**HELLO, "stream": True}))
        soon(lambda: server.runtime.open_turns == 1)
        sock.recv(1000)
        sock.close()
        soon(server.is_idle)


def test_a_slow_body_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "LIMITS", BodyLimits(timeout_s=0.2))
    with live(Front()) as server, server.raw(request(HELLO)[:-10]) as sock:
        answer = _read_until(sock, b"")
        assert answer.startswith(b"HTTP/1.1 408")
        assert b'"code":"body_too_slow"' in answer
        soon(server.is_idle)


def test_a_chunked_body_that_is_too_large_gets_a_clean_413(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(body, "LIMITS", BodyLimits(body_bytes=100_000))
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    chunk = b"2710\r\n" + b" " * 10_000 + b"\r\n"
    with live(Front()) as server:
        content = f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + chunk * 50
        with server.raw(content) as sock:
            assert _read_until(sock, b"}}").startswith(b"HTTP/1.1 413")
            sock.sendall(
                chunk * 50 + b"0\r\n\r\n" + request(HELLO)
            )  # the rest of the body is skipped
            assert _read_until(sock, b"}}").startswith(b"HTTP/1.1 200")
        with server.client() as client:
            answer = client.post(CHAT, content=iter([b" " * 50_000] * 20), headers=_json())
            assert answer.status_code == 413
            assert answer.json()["error"]["code"] == "body_too_large"


def test_a_megabyte_of_headers_is_rejected() -> None:
    with live(Front()) as server, server.client() as client:
        answer = client.get("/v1/models", headers={"X-Padding": "x" * (1 << 20)})
        assert answer.status_code == 431
        assert client.get("/v1/models").status_code == 200


def test_a_stopping_server_ends_streams_with_an_error_event_and_other_responses_with_503() -> None:
    front = Front(ScriptedRuntime(IN_REPLY))
    found: dict[str, httpx.Response] = {}

    def ask(name: str, server: Live) -> None:
        with server.client() as client:
            found[name] = client.post(CHAT, json={**HELLO, "stream": name == "streamed"})

    with live(front) as server:
        threads = [
            threading.Thread(target=ask, args=(name, server)) for name in ("streamed", "whole")
        ]
        for thread in threads:
            thread.start()
        soon(lambda: server.runtime.open_turns == 2)
        server.tell_to_stop()
        for thread in threads:
            thread.join()
    *_, failed, done = events(found["streamed"].text)
    assert failed.json["error"]["code"] == "unavailable"
    assert done.data == "[DONE]"
    assert found["whole"].status_code == 503
    assert front.runtime.open_turns == 0


def _json() -> dict[str, str]:
    return {"content-type": "application/json"}


def _read_until(sock: socket.socket, end: bytes) -> bytes:
    """Read until the data ends with `end`, or if that is empty until the connection closes."""
    answer = b""
    while (part := sock.recv(65536)) and not (end and (answer + part).endswith(end)):
        answer += part
    return answer + part
