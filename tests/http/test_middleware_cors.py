"""Web pages of allowed origins may call the server from a browser, with their keys."""

from __future__ import annotations

import httpx
import pytest

from rekindle.http.middleware import EXPOSED_HEADERS
from tests.api.scripted import Front

CHAT = "/v1/chat/completions"
PAGE = "https://app.example"
ASKS = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-os",
}


def preflight(front: Front, origin: str, **headers: str) -> httpx.Response:
    return front.request("OPTIONS", CHAT, headers={"origin": origin, **ASKS, **headers})


def allowed(answer: httpx.Response) -> str | None:
    name = "access-control-allow-origin"
    return str(answer.headers[name]) if name in answer.headers else None


def test_a_preflight_needs_no_key() -> None:
    front = Front(api_key=["secret"], cors_origin=[PAGE])
    asked = preflight(front, PAGE)
    assert asked.status_code == 200
    assert asked.content == b""
    assert allowed(asked) == PAGE
    assert asked.headers["access-control-allow-methods"] == "GET, POST, DELETE, OPTIONS"
    assert asked.headers["access-control-allow-headers"] == ASKS["access-control-request-headers"]
    assert asked.headers["vary"] == "Origin"
    answer = front.chat(headers={"origin": PAGE, "authorization": "Bearer secret"})
    assert (answer.status_code, allowed(answer)) == (200, PAGE)
    assert answer.headers["access-control-expose-headers"] == EXPOSED_HEADERS
    assert "access-control-allow-credentials" not in answer.headers


@pytest.mark.parametrize("stream", [False, True])
def test_a_page_can_read_streams_and_errors(stream: bool) -> None:
    front = Front(api_key=["secret"], cors_origin=[PAGE])
    key = {"origin": PAGE, "authorization": "Bearer secret"}
    assert allowed(front.chat(stream=stream, headers=key)) == PAGE
    assert allowed(front.chat(n=0, stream=stream, headers=key)) == PAGE
    refused = front.chat(headers={"origin": PAGE})
    assert (refused.status_code, allowed(refused)) == (401, PAGE)


@pytest.mark.parametrize(
    "origin",
    ["http://localhost:3000", "http://127.0.0.1", "https://[::1]:8443", "http://localhost"],
)
def test_local_pages_may_call_a_local_server(origin: str) -> None:
    assert allowed(preflight(Front(), origin)) == origin
    assert allowed(Front().chat(headers={"origin": origin})) == origin
    public = Front(host="0.0.0.0", api_key=["secret"])
    assert allowed(preflight(public, origin)) is None
    assert allowed(public.chat(headers={"origin": origin, "x-api-key": "secret"})) is None


@pytest.mark.parametrize(
    "origin",
    [
        "https://evil.example",
        "https://app.example.evil.example",
        "https://app.example:8443",
        "http://app.example",
        "http://localhost.evil.example",
        "http://evil.example@localhost",
        "http://localhost/path",
        "http://[::1",
        "null",
        "",
        "*",
    ],
)
def test_pages_of_other_origins_may_not_call(origin: str) -> None:
    front = Front(cors_origin=[PAGE])
    refused = preflight(front, origin)
    assert refused.status_code == 200, "without the headers, which is what a browser looks at"
    assert "access-control-allow-methods" not in refused.headers
    assert "--cors-origin" in refused.text
    answer = front.chat(headers={"origin": origin})
    assert allowed(answer) is allowed(refused) is None


def test_pages_of_the_names_that_a_proxy_forwards_may_call() -> None:
    front = Front(allowed_host=["models.example"], no_auth=True)
    for origin in ("https://models.example", "http://models.example:8080", "http://localhost"):
        assert allowed(preflight(front, origin)) == origin
    assert allowed(preflight(front, "https://other.example")) is None


def test_a_star_allows_all_origins() -> None:
    front = Front(cors_origin=["*"])
    for origin in (PAGE, "null", "https://other.example"):
        assert allowed(preflight(front, origin)) == origin


def test_an_allowed_page_may_reach_into_a_private_network() -> None:
    asks = {"access-control-request-private-network": "true"}
    answer = preflight(Front(cors_origin=[PAGE]), PAGE, **asks)
    assert answer.headers["access-control-allow-private-network"] == "true"


def test_invalid_header_names_of_a_preflight_are_not_echoed() -> None:
    asks = {"access-control-request-headers": "a;b=c\t" + "x" * 2000}
    answer = preflight(Front(cors_origin=[PAGE]), PAGE, **asks)
    assert "access-control-allow-headers" not in answer.headers


def test_the_host_is_checked_before_the_origin() -> None:
    """DNS rebinding: a page whose name resolves to this machine calls it as its own origin."""
    rebound = {"host": "evil.example"}
    assert preflight(Front(cors_origin=["*"]), "http://evil.example", **rebound).status_code == 421
    answer = Front(cors_origin=["*"]).chat(headers={"origin": "http://localhost", **rebound})
    assert answer.status_code == 421


def test_a_program_gets_no_cors_headers() -> None:
    answer = Front(cors_origin=["*"]).chat()
    assert not [name for name in answer.headers if name.startswith("access-control")]
