"""Malicious names harm nobody else, and no secret appears anywhere."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from tests.support.server import Server, running
from tests.support.tiny import write_llama

CANARY = "canary-77e1b0"
KEY, OTHER_KEY, ADMIN_KEY = f"{CANARY}-key", "key-of-bert-81d2", f"{CANARY}-admin"
CHAT = "/v1/chat/completions"
SESSIONS = "/v1/internal/model/kv_cache"
RETURN_S = 60.0
IDS = [
    "../../etc/passwd",
    "..",
    "/",
    "C:\\x",
    "a/b",
    "a\x00b",
    "\x1b[2J\r\n",
    "\uff0e\uff0e\uff0f",
    "",
    " ",
    "x" * 10_000,
    "%2e%2e%2f",
    "\u202e",
    "{}",
    "'; DROP TABLE entries; --",
]
SURROGATE = b'{"messages": [{"role": "user", "content": "hi"}], "session_id": "\\ud800"}'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose folder names contain the canary, too."""
    folder = tmp_path_factory.mktemp(f"{CANARY}-folder")
    model = write_llama(folder / "tiny.gguf", context=2048)
    keys = ["--api-key", KEY, "--api-key", OTHER_KEY, "--admin-key", ADMIN_KEY]
    with running(model, folder, "--threads", "1", "--force-cache", *keys) as running_server:
        yield running_server


def client(server: Server, key: str) -> httpx.Client:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.Client(base_url=server.url, headers=headers, timeout=120)


def said(text: str, **fields: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 4}
    return {**body, **fields}


def with_bad_names(http: httpx.Client) -> Iterator[httpx.Response]:
    """Requests with each bad id in every field that takes an id."""
    for bad in IDS:
        path = quote(bad, safe="")
        for field in ("cache_key", "session_id", "prompt_cache_key", "kv_cache_session_id"):
            yield http.post(CHAT, json=said("hi", **{field: bad}))
        named = {"role": "user", "content": "hi", "message_id": bad}
        yield http.post(CHAT, json=said("", messages=[named], use_kv_cache=True))
        yield http.post("/v1/cache/validate", json={**said("hi"), "cache_key": bad})
        yield http.post(f"{SESSIONS}/remove_cache", json={"session_id": bad})
        yield http.get(f"/v1/cache/{path}")
        yield http.post(f"/v1/cache/{path}/pin")
        yield http.delete(f"/v1/cache/{path}")
        yield http.get("/v1/cache", params={"after": bad})
        for field in ("previous_response_id", "conversation", "prompt_cache_key"):
            yield http.post(
                "/v1/responses", json={"input": "hi", "max_output_tokens": 1, field: bad}
            )
        yield http.get(f"/v1/responses/{path}")
        yield http.delete(f"/v1/conversations/{path}/items/{path}")
    headers = {"content-type": "application/json"}
    yield http.post(CHAT, content=SURROGATE, headers=headers)


def stream_text(lines: Iterator[str]) -> str:
    """The rest of the text of a stream, which must end successfully."""
    text, last = "", ""
    for line in lines:
        if line.startswith("data: "):
            last = line.removeprefix("data: ")
            if last != "[DONE]":
                for choice in json.loads(last)["choices"]:
                    text += choice["delta"].get("content") or ""
    assert last == "[DONE]"
    return text


def test_a_stream_is_not_disturbed_by_bad_names_in_other_requests(server: Server) -> None:
    body = said("Tell me a long story.", max_tokens=400, ignore_eos=True, stream=True)
    with client(server, OTHER_KEY) as bert, client(server, KEY) as anna:
        with anna.stream("POST", CHAT, json={**body, "use_kv_cache": False}) as response:
            alone = stream_text(response.iter_lines())
        with anna.stream("POST", CHAT, json={**body, "use_kv_cache": False}) as response:
            lines = response.iter_lines()
            next(lines)  # the stream has begun
            statuses = {answer.status_code for answer in with_bad_names(bert)}
            assert stream_text(lines) == alone
        assert statuses <= {200, 400, 404}
        assert {200, 400, 404} <= statuses
        assert bert.get("/health").json()["status"] == "ok"
    assert len(server.worker_pids()) == 1


def errors_of_a_session(server: Server) -> list[httpx.Response]:
    """Every error that a client with secrets can cause."""
    secret = f"The {CANARY}-prompt sings."
    found = []
    with client(server, KEY) as anna, client(server, f"{CANARY}-wrong") as stranger:
        assert anna.post(CHAT, json=said(secret, session_id=f"{CANARY}-name")).is_success
        with anna.stream("POST", CHAT, json=said(secret, stream=True)) as response:
            stream_text(response.iter_lines())
        for fields in (
            {"temperature": secret},
            {"messages": secret},
            {"messages": [{"role": "user", "content": [{"type": "image", "text": secret}]}]},
            {"messages": [{"role": "tool", "content": secret}]},
            {"tools": [{"type": "function", "function": {"name": secret}}]},
            {"response_format": {"type": "json_schema", "json_schema": {"name": secret}}},
            {"session_id": secret * 99},
            {"messages": [{"role": "user", "content": secret * 2000}]},
        ):
            found.append(anna.post(CHAT, json={**said(secret), **fields}))
        headers = {"content-type": "application/json"}
        found.append(anna.post(CHAT, content=f'{{"{secret}": NaN', headers=headers))
        found.append(stranger.post(CHAT, json=said(secret)))
        found.append(anna.get(f"/v1/cache/{CANARY}-path"))
        found.append(anna.get("/metrics"))
        os.kill(server.worker_pids()[0], signal.SIGKILL)
        found.append(anna.post(CHAT, json=said(secret)))
        returned(anna)
    return found


def returned(http: httpx.Client) -> None:
    deadline = time.monotonic() + RETURN_S
    while http.get("/health").status_code != httpx.codes.OK:
        assert time.monotonic() < deadline, "the model did not come back"
        time.sleep(0.05)


def test_prompts_keys_and_paths_appear_nowhere(server: Server) -> None:
    """No error, metric, file name or log line contains them, in a session with all kinds of errors.

    Only the log of the start names the cache folder, for the operator.
    """
    start = server.log.read_text()
    errors = errors_of_a_session(server)
    assert all(answer.is_error for answer in errors)
    with client(server, ADMIN_KEY) as root:
        metrics = root.get("/metrics").text
    log = server.log.read_text().removeprefix(start)
    assert ": prompt " in log
    assert "died" in log
    folder = server.log.parent / "kv"
    files = "\n".join(str(path.relative_to(folder)) for path in folder.rglob("*"))
    assert files
    assert "rekindle_computed_tokens_total" in metrics
    for place in (log, metrics, files, *(answer.text for answer in errors)):
        assert CANARY not in place, place[:1000]


def test_log_lines_of_the_runtime_have_the_request_id(server: Server) -> None:
    with client(server, KEY) as anna:
        answer = anna.post(CHAT, json=said("Hello."), headers={"X-Request-Id": "req-of-anna.1"})
    assert answer.headers["x-request-id"] == "req-of-anna.1"
    deadline = time.monotonic() + 30  # the line is written after the response
    while "POST /v1/chat/completions 200: prompt " not in (
        log := "\n".join(
            line for line in server.log.read_text().splitlines() if "[req-of-anna.1]" in line
        )
    ):
        assert time.monotonic() < deadline, log
        time.sleep(0.02)
    lines = log.splitlines()
    assert any("FingerprintManager: registered new session" in line for line in lines)
