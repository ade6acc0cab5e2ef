"""Export and import over HTTP: ownership, paths and refusals."""

from __future__ import annotations

import asyncio
import fcntl
import os
import tempfile
from pathlib import Path
from typing import Any, BinaryIO

import httpx
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from rekindle.api.cache import files
from rekindle.http.body import BodyLimits
from rekindle.protocol.admin import AdminOp, AdminResult, ExportState, ImportState, StateFile
from rekindle.protocol.frames import POOL, RAM, Capacity
from tests.api.cache.entries import ENTRY
from tests.api.scripted import PATIENCE_S, Front, ScriptedRuntime, error, lifespan, unknown_key

FILE = {"Content-Type": "application/octet-stream"}
CONTENT = bytes(range(256)) * 9000


class Files:
    """A runtime that writes and reads files, and remembers where."""

    def __init__(self) -> None:
        self.places: list[Path] = []
        self.received = b""

    def __call__(self, op: AdminOp) -> AdminResult:
        match op:
            case ExportState("key-1", folder):
                self.places.append(Path(folder))
                assert Path(folder).stat().st_mode & 0o777 == 0o700
                (Path(folder) / "state.safetensors").write_bytes(CONTENT)
                return StateFile("state.safetensors", 7, len(CONTENT))
            case ImportState(path):
                self.places.append(Path(path).parent)
                self.received = Path(path).read_bytes()
                return ENTRY
        raise unknown_key()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def front(runtime: Files, **settings: Any) -> Front:
    return Front(ScriptedRuntime(answers=runtime), **{"disk_floor": 0, **settings})


def upload(front: Front, content: Any = CONTENT, **options: Any) -> httpx.Response:
    options = {"headers": FILE, **options}
    return front.request("POST", "/v1/cache/import", content=content, **options)


def test_a_file_is_sent_and_nothing_of_it_stays(folder: Path) -> None:
    runtime = Files()
    answer = front(runtime).get("/v1/cache/key-1/export")
    assert answer.content == CONTENT
    assert answer.headers["content-type"] == "application/octet-stream"
    assert answer.headers["x-token-count"] == "7"
    assert answer.headers["content-disposition"].endswith("state.safetensors")
    assert runtime.places[0].parent == folder
    assert list(folder.iterdir()) == []


def test_a_file_is_taken_and_nothing_of_it_stays(folder: Path) -> None:
    runtime = Files()
    asked = front(runtime)
    answer = upload(asked, params={"session_id": "mine", "model": "tiny"})
    assert answer.status_code == 200, answer.text
    assert answer.json()["cache_key"] == "key-1"
    assert runtime.received == CONTENT
    received = asked.runtime.admin_request
    assert isinstance(received.op, ImportState)
    assert received.op.session_id == "mine"
    assert list(folder.iterdir()) == []


def test_a_larger_file_than_any_other_body_is_taken() -> None:
    """As it arrives, from a client that does not say how large it is."""

    async def parts() -> Any:
        for _ in range(70):
            yield b"," * (1 << 20)  # of which a JSON body may not have so many

    runtime = Files()
    assert upload(front(runtime), parts()).status_code == 200
    assert len(runtime.received) == 70 << 20


def test_keys_and_names_never_become_paths(folder: Path) -> None:
    runtime = Files()
    for key in ("../../etc/passwd", "a%2F..%2Fb", "%00", "x" * 3000):
        assert front(runtime).get(f"/v1/cache/{key}/export").status_code == 404
    for name in ("../../etc/passwd", "/tmp/x", "a\0b"):
        assert upload(front(runtime), params={"session_id": name}).status_code == 200
    assert all(place.parent == folder for place in runtime.places)
    assert list(folder.iterdir()) == []


def test_an_admin_acts_for_itself_alone() -> None:
    asked = front(Files(), api_key=["alpha"], admin_key=["root"])
    headers = {"Authorization": "Bearer root"}
    asked.get("/v1/cache/key-1/export", headers=headers)
    upload(asked, headers={**FILE, **headers})
    assert [each.admin for each in asked.runtime.admin_requests] == [False, False]
    assert upload(asked).status_code == 401
    assert asked.get("/v1/cache/key-1/export").status_code == 401


@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        (b"", FILE, 400),
        (CONTENT, {"Content-Type": "application/json"}, 415),
        (CONTENT, {"Content-Type": "text/plain"}, 415),
        (CONTENT, {}, 415),
    ],
)
def test_a_request_without_an_upload_is_refused(
    content: bytes, headers: dict[str, str], status: int, folder: Path
) -> None:
    asked = front(Files())
    answer = upload(asked, content, headers=headers)
    assert answer.status_code == status
    assert error(answer)["message"]
    assert asked.runtime.admin_requests == []
    assert list(folder.iterdir()) == []


def test_a_file_beyond_the_cache_or_the_disk_is_refused(folder: Path) -> None:
    small = front(Files())
    assert small.runtime.ready is not None
    small.runtime.ready.capacities = (Capacity(POOL, 1 << 20, 1 << 40), Capacity(RAM, 7, 1 << 20))
    for asked in (small, front(Files(), disk_floor=1 << 59)):
        answer = upload(asked)
        assert answer.status_code == 413
        assert "room" in error(answer)["message"]
        assert asked.runtime.admin_requests == []
    assert list(folder.iterdir()) == []


def test_an_upload_that_announces_too_much_is_refused_before_it_is_read() -> None:
    read: list[bytes] = []

    async def parts() -> Any:
        read.append(b"x")
        yield b"x"

    asked = front(Files())
    answer = upload(asked, parts(), headers={**FILE, "Content-Length": str(1 << 50)})
    assert answer.status_code == 413
    assert read == []


def test_an_engine_that_cannot_import_refuses_before_the_upload_is_read(folder: Path) -> None:
    read: list[bytes] = []

    async def parts() -> Any:
        read.append(b"x")
        yield b"x"

    asked = front(Files())
    assert asked.runtime.ready is not None
    asked.runtime.ready.has_state_files = False
    answer = upload(asked, parts())
    assert answer.status_code == 400
    assert "cannot be exported or imported" in error(answer)["message"]
    assert read == []
    assert asked.runtime.admin_requests == []


def test_the_folder_of_a_server_that_was_killed_is_removed_at_the_next_start(folder: Path) -> None:
    killed, used, other = (
        folder / name for name in ("rekindle-transfer-1", "rekindle-transfer-2", "else")
    )
    link = folder / "rekindle-transfer-3"
    for each in (killed, used, other):
        each.mkdir()
        (each / "state").write_bytes(CONTENT)
    link.symlink_to(other)
    descriptor = os.open(used, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        front(Files()).get("/health")
    finally:
        os.close(descriptor)
    assert sorted(folder.iterdir()) == [other, used, link]
    assert (other / "state").exists()
    assert (used / "state").exists()


def test_a_server_that_starts_leaves_the_folder_of_a_transfer_in_flight(folder: Path) -> None:
    runtime = Files()

    def answers(op: AdminOp) -> AdminResult:
        files.remove_left_over_folders()
        return runtime(op)

    assert upload(Front(ScriptedRuntime(answers=answers), disk_floor=0)).status_code == 200
    assert runtime.received == CONTENT


def test_other_routes_take_no_body_of_any_size() -> None:
    answer = front(Files()).request("DELETE", "/v1/cache/import", content=b"x" * (65 << 20))
    assert answer.status_code == 413


def test_too_slow_an_upload_and_one_too_many_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LIMITS", BodyLimits(timeout_s=-1e9))
    assert upload(front(Files())).status_code == 408
    monkeypatch.setattr(files, "MAX_TRANSFERS", 0)
    assert upload(front(Files())).status_code == 429


def second_while_sending(asked: Front, *, gone: bool) -> list[int]:
    """The statuses of an export, of one more of the same tenant while the first is being sent, and
    of one after it; `gone`: the client of the first leaves."""
    path, statuses = "/v1/cache/key-1/export", []

    async def ask(app: ASGIApp) -> None:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            statuses.append((await http.get(path)).status_code)

    async def run() -> None:
        async with lifespan(asked.app()) as app:

            async def spied(scope: Scope, receive: Receive, send: Send) -> None:
                async def sent(message: Any) -> None:
                    if message["type"] == "http.response.body" and not statuses:
                        await ask(app)
                        if gone:
                            raise OSError("gone")
                    await send(message)

                await app(scope, receive, sent)

            await ask(spied)
            await ask(app)

    asyncio.run(run())
    return statuses


@pytest.mark.parametrize("gone", [False, True])
def test_a_tenant_has_one_file_on_its_way_until_it_is_sent_or_its_client_left(gone: bool) -> None:
    second, first, third = second_while_sending(front(Files()), gone=gone)
    assert (second, third) == (429, 200)
    assert first == 200 or gone


def test_an_export_that_nobody_reads_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(files, "MAX_TRANSFER_S", 0.05)
    (tmp_path / "state").write_bytes(CONTENT)

    async def unread(_message: Any) -> None:
        await asyncio.Event().wait()

    async def run(file: BinaryIO) -> None:
        scope = {"type": "http", "asgi": {"spec_version": "2.3"}}
        stream = files.FileStream(file, file.close, {})
        await stream(scope, asyncio.Event().wait, unread)  # type: ignore[arg-type]

    with (tmp_path / "state").open("rb") as file:
        asyncio.run(asyncio.wait_for(run(file), PATIENCE_S))
        assert file.closed


def test_an_upload_ends_after_an_hour_however_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_TRANSFER_S", -1.0)
    assert upload(front(Files())).status_code == 408
