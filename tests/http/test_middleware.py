"""Requests with a wrong key, host, content type, size or path are rejected."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from rekindle.front.app import ROUTERS
from rekindle.http import body as request_body
from rekindle.http import middleware
from rekindle.http.auth import Caller, Keys, caller_of
from rekindle.http.body import BodyLimits
from rekindle.http.protocol import MAX_HEADER_BYTES
from rekindle.protocol.admin import Removed
from tests.api.scripted import HELLO, Front, ScriptedRuntime, error

CHAT = "/v1/chat/completions"
KEY = {"Authorization": "Bearer secret"}
PAGE = {"Origin": "http://localhost:3000"}


@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches", "/v1/audio/transcriptions"])
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_what_openai_serves_and_this_server_does_not_is_not_found(method: str, path: str) -> None:
    """Uploads are forms. A client learns that there is no such path, not that it is no JSON."""
    body = {"files": {"file": ("a.txt", b"x")}} if method == "POST" else {}
    answer = Front().request(method, path, **body)
    assert (answer.status_code, error(answer)["code"]) == (404, "not_found")


OPEN = ("/", "/health", "/health/ready")  # the first shows less without a key


ENDLESS = "/v1/internal/live"  # a stream that ends with its client


def routes() -> list[str]:
    """Return every path that the application serves, including its pages."""
    listed = (route for router in ROUTERS for route in router.routes)
    paths = {"/openapi.json", *(route.path for route in listed if isinstance(route, APIRoute))}
    assert {"/", "/docs", "/health", CHAT} <= paths
    served = {path for path in paths if not path.startswith("/console/")}  # files without data
    return sorted(re.sub(r"{.*}", "tiny", path) for path in served)


SAME_ID = {"x-request-id": "req_1"}


def spellings(path: str) -> list[str]:
    return [path, f"{path}/", f"/{path}", path.replace("/", "//"), path.replace("/", "/%2f")]


@pytest.mark.parametrize(
    "headers", [{}, {"Authorization": "Bearer wrong"}, {"X-Api-Key": "wrong"}, PAGE]
)
@pytest.mark.parametrize("path", [path for path in routes() if path not in OPEN])
def test_every_path_needs_the_key(path: str, headers: dict[str, str]) -> None:
    front = Front(api_key=["secret"])
    for spelled in spellings(path):
        for method in ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"):
            answer = front.request(method, f"http://localhost{spelled}", headers=headers, json={})
            assert answer.status_code == 401, (method, spelled)
            if method != "HEAD":
                is_wrong = "wrong" in "".join(headers.values())
                assert ("key is wrong" if is_wrong else "needs an API key") in answer.text
            assert answer.headers["www-authenticate"] == "Bearer"
    assert front.runtime.requests == []


@pytest.mark.parametrize("spelled", ["/health/", "//health", "/Health", "/health/x", "/health%2f"])
def test_only_health_needs_no_key(spelled: str) -> None:
    front = Front(api_key=["secret"])
    assert front.get("/health").status_code == 200
    assert front.get(f"http://localhost{spelled}").status_code == 401


@pytest.mark.parametrize(
    "header",
    [
        "Bearer",
        "Bearer ",
        "Bearer  ",
        "secret",
        "Basic secret",
        "Bearer secret2",
        "Bearer SECRET",
        "Bearer secre",
        "Bearer secret secret",
    ],
)
def test_a_wrong_key_is_rejected(header: str) -> None:
    answer = Front(api_key=["secret"]).get("/v1/models", headers={"Authorization": header})
    assert answer.status_code == 401
    assert "secret" not in answer.text


@pytest.mark.parametrize(
    "header", ["Bearer secret", "bearer secret", "Bearer  secret", "Bearer two"]
)
def test_each_of_several_keys_is_accepted(header: str) -> None:
    front = Front(api_key=["secret", "two"])
    assert front.get("/v1/models", headers={"Authorization": header}).status_code == 200


def test_a_key_is_accepted_in_the_header_of_anthropics_clients() -> None:
    front = Front(api_key=["secret"])
    assert front.get("/v1/models", headers={"x-api-key": "secret"}).status_code == 200
    assert front.get("/v1/models", headers={"x-api-key": "secre"}).status_code == 401


def test_a_server_without_keys_is_open() -> None:
    assert Front().get("/v1/models").status_code == 200


def test_routes_know_the_caller() -> None:
    """Each key has its own salt, and only an admin key makes the caller an admin."""
    scopes: list[Scope] = []

    async def inside(scope: Scope, _receive: Receive, _send: Send) -> None:
        scopes.append(scope)

    keys = Keys(["alpha", "beta"], admin=["root"])
    checked = middleware.RequestMiddleware(inside, keys, "127.0.0.1")
    for path, key in (("/a", "alpha"), ("/a", "beta"), ("/a", "root"), ("/health", "root")):
        headers = [(b"host", b"localhost"), (b"authorization", f"Bearer {key}".encode())]
        scope = {"type": "http", "method": "GET", "path": path, "headers": headers}
        asyncio.run(checked(scope, None, None))  # type: ignore[arg-type]
    callers = [caller_of(Request(scope)) for scope in scopes]
    assert [caller.admin for caller in callers] == [False, False, True, False]
    assert len({caller.salt for caller in callers}) == 4
    assert callers[-1].salt == b""


def test_on_an_open_server_everybody_is_admin() -> None:
    scopes: list[Scope] = []

    async def inside(scope: Scope, _receive: Receive, _send: Send) -> None:
        scopes.append(scope)

    scope = {"type": "http", "method": "GET", "path": "/a", "headers": [(b"host", b"localhost")]}
    asyncio.run(middleware.RequestMiddleware(inside, Keys(), "::1")(scope, None, None))  # type: ignore[arg-type]
    [seen] = scopes
    assert caller_of(Request(seen)) == Caller(b"", admin=True)


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:8080", "LOCALHOST", "127.0.0.1:1", "[::1]", "[::1]:8080"]
)
@pytest.mark.parametrize("bound", ["127.0.0.1", "localhost", "::1"])
def test_a_local_server_answers_to_its_own_names(bound: str, host: str) -> None:
    answer = Front(host=bound).get("/v1/models", headers={"Host": host})
    assert answer.status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example:80", "", "[::2]"]
)
def test_a_local_server_rejects_other_host_names(host: str) -> None:
    for path in ("/v1/models", "/health", "/docs"):
        answer = Front().get(path, headers={"Host": host})
        assert answer.status_code == 421
        assert error(answer)["code"] == "wrong_host"
        assert error(answer)["message"].startswith("Host ")


def test_a_local_server_answers_to_the_names_that_a_proxy_forwards() -> None:
    front = Front(allowed_host=["models.example"], api_key=["secret"])
    for host, status in (
        ("models.example", 200),
        ("Models.Example:443", 200),
        ("localhost", 200),
        ("evil.example", 421),
        ("models.example.evil.example", 421),
    ):
        answer = front.get("/v1/models", headers={"Host": host, **KEY})
        assert answer.status_code == status, host


def test_a_public_server_answers_to_any_host_name() -> None:
    front = Front(host="0.0.0.0", api_key=["secret"])
    answer = front.get("/v1/models", headers={"Host": "models.example", **KEY})
    assert answer.status_code == 200


def test_an_invalid_host_is_not_a_server_error() -> None:
    for path in ("/nowhere", "/v1/models/", "/v1/completions/"):
        assert Front().get(path, headers={"Host": "[::1"}).status_code < 500


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""]
)
def test_only_the_json_content_type_is_accepted(kind: str) -> None:
    answer = Front().request("POST", CHAT, content=b"{}", headers={"content-type": kind})
    assert answer.status_code == 415
    assert error(answer)["code"] == "unsupported_media_type"


def test_the_content_type_may_name_a_charset() -> None:
    content = b'{"messages": [{"role": "user", "content": "hi"}]}'
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    assert Front().request("POST", CHAT, content=content, headers=headers).status_code == 200


def test_other_origins_get_no_cors_headers() -> None:
    answer = Front().post(CHAT, HELLO, headers={"Origin": "https://evil.example"})
    assert not [name for name in answer.headers if name.startswith("access-control")]
    answer = Front().request("OPTIONS", CHAT, headers={"Origin": "https://evil.example"})
    assert answer.status_code == 405


@pytest.fixture
def small_bodies(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(request_body, "LIMITS", BodyLimits(body_bytes=1000))
    return 1000


def test_a_body_announced_as_too_large_is_rejected_unread(small_bodies: int) -> None:
    async def nothing() -> AsyncIterator[bytes]:
        raise AssertionError("the body was read")
        yield b""

    headers = {"content-type": "application/json", "content-length": str(small_bodies + 1)}
    answer = Front().request("POST", CHAT, content=nothing(), headers=headers)
    assert answer.status_code == 413
    assert error(answer)["code"] == "body_too_large"


@pytest.mark.parametrize("length", ["9" * 30, "9" * 5000])
def test_an_absurd_content_length_is_too_large(length: str) -> None:
    headers = {"content-type": "application/json", "content-length": length}
    assert Front().request("POST", CHAT, headers=headers).status_code == 413


def test_a_chunked_body_is_rejected_as_soon_as_it_is_too_large(small_bodies: int) -> None:
    sent = 0

    async def flood() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(1000):
            sent += 100
            yield b" " * 100

    headers = {"content-type": "application/json"}
    answer = Front().request("POST", CHAT, content=flood(), headers=headers)
    assert answer.status_code == 413
    assert error(answer)["code"] == "body_too_large"
    assert sent <= small_bodies + 200


def test_a_body_at_the_limit_is_accepted(small_bodies: int) -> None:
    content = b'{"messages": [{"role": "user", "content": "hi"}]}'.ljust(small_bodies)
    headers = {"content-type": "application/json"}
    assert Front().request("POST", CHAT, content=content, headers=headers).status_code == 200


def test_large_headers_are_rejected() -> None:
    headers = {"X-Padding": "x" * MAX_HEADER_BYTES}
    answer = Front().get("/v1/models", headers=headers)
    assert answer.status_code == 431
    assert error(answer)["code"] == "headers_too_large"


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("POST", "/", 405, "method_not_allowed"),
        ("GET", "/v1/nothing", 404, "not_found"),
        ("POST", f"{CHAT}/", 404, "not_found"),
        ("POST", f"/{CHAT}", 404, "not_found"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
        ("GET", "/" + "x" * 5000, 404, "not_found"),
    ],
)
def test_a_wrong_path_or_method_gets_an_error_in_openais_shape(
    method: str, path: str, status: int, code: str
) -> None:
    answer = Front().request(method, f"http://localhost{path}", json={})
    assert answer.status_code == status
    found = error(answer)
    assert found["code"] == code
    assert found["message"].startswith(f"{method} {path[:128]} ")
    assert ("allow" in answer.headers) == (status == 405)


def test_every_path_works_without_its_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Errors are the same, too."""
    monkeypatch.setattr("rekindle.api.base.models.time.time", lambda: 1.0)  # of each server's start
    for path in routes():
        if not path.startswith("/v1/") or path == ENDLESS:
            continue
        for method in ("GET", "POST", *(["DELETE"] if "{key}" in path else [])):
            with_version, without = (
                Front().request(method, f"http://localhost{each}", json={}, headers=SAME_ID)
                for each in (path, path.removeprefix("/v1"))
            )
            assert (with_version.status_code, with_version.content) == (
                without.status_code,
                without.content,
            ), (method, path)
    assert Front().get("/chat/nothing").status_code == 404
    assert Front().get("/v2/models").status_code == 404


@pytest.mark.parametrize(
    ("path", "host", "status"),
    [
        ("/v1/responses", b"localhost", 401),
        ("/responses", b"localhost", 401),
        ("/v1/models", b"localhost", 401),
        ("/v1/responses", b"evil.example", 421),
    ],
)
@pytest.mark.parametrize("can_answer", [True, False])
def test_a_websocket_is_checked_like_a_request(
    path: str, host: bytes, status: int, can_answer: bool
) -> None:
    """A server that cannot answer a refused WebSocket with a status closes it."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        raise AssertionError("nobody listens")

    async def send(message: Any) -> None:
        sent.append(message)

    app: Any = Front(api_key=["secret"]).app()
    extensions: dict[str, Any] = {"websocket.http.response": {}} if can_answer else {}
    scope = {"type": "websocket", "path": path, "headers": [(b"host", host)]}
    coroutine = app({**scope, "extensions": extensions}, receive, send)
    with pytest.raises(StopIteration):
        coroutine.send(None)
    if can_answer:
        start, body = sent
        assert start["type"] == "websocket.http.response.start"
        assert start["status"] == status
        assert b'"error"' in body["body"]
    else:
        assert sent == [{"type": "websocket.close", "code": 1008}]


def test_without_an_embedding_model_the_error_names_the_flag() -> None:
    answer = Front().request("POST", "http://localhost/v1/embeddings", json={"input": "x"})
    assert answer.status_code == 400
    assert error(answer)["code"] == "unsupported_parameter"
    assert "start the server with --embedding-model" in error(answer)["message"]


@pytest.mark.parametrize(
    ("path", "more", "status"),
    [
        ("/api/show", {}, 200),
        ("/api/show", {"origin": "http://localhost"}, 415),
        ("/api/show", {"sec-fetch-site": "cross-site"}, 415),
        ("/v1/tokenize", {}, 415),
    ],
)
@pytest.mark.parametrize(
    "kind", ["application/x-www-form-urlencoded", "application/octet-stream", ""]
)
def test_ollamas_paths_accept_the_default_content_types_of_programs(
    path: str, more: dict[str, str], status: int, kind: str
) -> None:
    """curl without a header, and LiteLLM."""
    headers = {"content-type": kind, **more}
    answer = Front().request("POST", path, content=b'{"model": "tiny"}', headers=headers)
    assert answer.status_code == status


def test_a_post_without_a_body_needs_no_content_type_unless_a_page_sends_it() -> None:
    front = Front(ScriptedRuntime(answers=lambda _op: Removed(2, 30)))
    bare = front.request("POST", "/v1/cache/gc")
    assert bare.json() == {"status": "ok", "removed": 2, "freed_bytes": 30}
    page = front.request("POST", "/v1/cache/gc", headers={"Origin": "https://example.org"})
    assert page.status_code == 415
    text = front.request(
        "POST", "/v1/cache/gc", content="x", headers={"Content-Type": "text/plain"}
    )
    assert text.status_code == 415
