"""Every request leaves exactly one line in the log, whatever became of it."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from rekindle.errors import TooManyRequests, Unavailable
from rekindle.http.records import GAP_BOUNDS_S, RequestRecord, endpoint_of
from rekindle.protocol.events import Embedded, Finished, Prefill, Stages, Started
from tests.api.live import live, soon
from tests.api.scripted import (
    HELLO,
    Front,
    Pause,
    ScriptedRuntime,
    delta,
    failed,
    finished,
    hit,
    reply,
)

CHAT = "/v1/chat/completions"
SECRET = "the secret of anna"
KEYED: dict[str, Any] = {"api_key": ["alpha"], "admin_key": ["root"]}


class Lines(logging.Handler):
    """The lines of requests, and their fields."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    @property
    def texts(self) -> list[str]:
        return [record.getMessage() for record in self.records]

    @property
    def only(self) -> dict[str, Any]:
        [record] = self.records
        fields: dict[str, Any] = record.fields  # type: ignore[attr-defined]
        return fields


@pytest.fixture
def lines() -> Iterator[Lines]:
    log, found = logging.getLogger("rekindle.request"), Lines()
    before = log.level
    log.setLevel(logging.DEBUG)
    log.addHandler(found)
    yield found
    log.removeHandler(found)
    log.setLevel(before)


@pytest.mark.parametrize(
    ("status", "code", "method", "path", "options"),
    [
        (400, "invalid_value", "POST", CHAT, {"json": {"messages": SECRET}}),
        (401, "invalid_api_key", "POST", CHAT, {"json": HELLO, "headers": {"x-api-key": SECRET}}),
        (403, "admin_key_required", "GET", "/metrics", {}),
        (404, "not_found", "GET", "/v1/nowhere", {}),
        (404, "model_not_found", "POST", CHAT, {"json": {**HELLO, "model": SECRET}}),
        (405, "method_not_allowed", "GET", "/v1/completions", {}),
        (415, "unsupported_media_type", "POST", CHAT, {"content": SECRET}),
        (421, "wrong_host", "GET", "/v1/models", {"headers": {"host": "evil.example"}}),
        (431, "headers_too_large", "GET", "/v1/models", {"headers": {"x-a": "x" * 70_000}}),
    ],
)
def test_a_refused_request_leaves_one_line_without_content(
    status: int, code: str, method: str, path: str, options: dict[str, Any], lines: Lines
) -> None:
    headers = {"x-api-key": "alpha", **options.pop("headers", {})}
    answer = Front(**KEYED).request(method, path, headers=headers, **options)
    assert answer.status_code == status
    assert (lines.only["status"], lines.only["error"]) == (status, code)
    assert lines.texts[0].startswith(f"{method} {path} {status}: {code}, total ")
    assert SECRET not in str(lines.only)


def test_a_turn_that_is_refused_names_its_model(lines: Lines) -> None:
    for refusal in (TooManyRequests("full"), Unavailable("loading")):
        Front(ScriptedRuntime([refusal])).chat()
    assert [line.partition(", total")[0] for line in lines.texts] == [
        f"tiny POST {CHAT} 429: queue_full",
        f"tiny POST {CHAT} 503: unavailable",
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_a_complete_turn_has_all_figures(stream: bool, lines: Lines) -> None:
    end = Finished(
        0, "length", 3622, 175, 0.2, hit(3239, "device"), completion_s=1.74,
        stages=Stages(queue=0.5, compute=0.25),
    )  # fmt: skip
    Front(ScriptedRuntime(reply("a", "b", end=end)), **KEYED).chat(
        stream=stream, headers={"x-api-key": "alpha"}
    )
    fields = lines.only
    assert fields.pop("first_token_s") >= 0
    assert fields.pop("total_s") >= 0
    tenant = fields.pop("tenant")
    assert len(tenant) == 12
    assert fields == {
        "model": "tiny", "method": "POST", "endpoint": CHAT, "status": 200,
        "prompt_tokens": 3622, "reused_tokens": 3239, "tier": "device",
        "reuse_reason": "full_match", "output_tokens": 175, "tokens_per_s": 100.0,
        "finish_reason": "length",
    }  # fmt: skip
    [line] = lines.texts
    start = f"tiny POST {CHAT} 200: prompt 3622 (3239 reused from device), output 175, first token "
    assert line.startswith(start)
    assert line.endswith(f" s, 100 tok/s, stop=length, tenant={tenant}")


def test_the_prompt_of_several_choices_counts_once(lines: Lines) -> None:
    Front(ScriptedRuntime(reply("a", "b"))).chat(n=3)
    assert (lines.only["prompt_tokens"], lines.only["output_tokens"]) == (10, 6)


def test_a_stream_whose_turn_fails_leaves_one_line_with_the_error(lines: Lines) -> None:
    broken = failed(503, "server_error", "model_restarting", "it died")
    Front(ScriptedRuntime([Started(0, 10, 4), delta("x"), broken])).chat(stream=True)
    fields = lines.only
    assert (fields["status"], fields["error"]) == (200, "model_restarting")
    assert (fields["prompt_tokens"], fields["reused_tokens"], fields["output_tokens"]) == (10, 4, 1)
    assert "finish_reason" not in fields


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_one_line(stream: bool, lines: Lines) -> None:
    with live(Front(ScriptedRuntime([Started(0, 10, 0), delta("Hel"), Pause()]))) as server:
        body = json.dumps({**HELLO, "stream": stream}).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        sock = server.raw(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        soon(lambda: server.runtime.open_turns == 1)
        if stream:
            assert sock.recv(65536).startswith(b"HTTP/1.1 200")
        assert lines.records == []
        sock.close()
        soon(server.is_idle)
        soon(lambda: bool(lines.records))
    assert (lines.only["status"], lines.only["error"]) == (200 if stream else 499, "client_gone")


def test_a_request_that_never_reaches_the_application_is_one_line(lines: Lines) -> None:
    with live(Front()) as server:
        with server.raw(b"this is no HTTP\r\n\r\n") as sock:
            answer = sock.recv(65536)
        assert answer.startswith(b"HTTP/1.1 400")
    assert lines.texts[0].startswith("- - 400: invalid_http, total ")
    assert len(lines.texts) == 1
    assert lines.records[0].request_id in answer.decode()  # type: ignore[attr-defined]


def test_embeddings_have_their_tokens(lines: Lines) -> None:
    embedder = ScriptedRuntime([Embedded(0, b"\0" * 8, 2, 7, 3)], name="bert")
    front = Front(embedders=[embedder])
    assert front.post("/v1/embeddings", {"model": "bert", "input": "a"}).status_code == 200
    fields = lines.only
    assert (fields["model"], fields["prompt_tokens"], fields["reused_tokens"]) == ("bert", 7, 3)


def test_a_background_response_is_one_line_when_it_has_ended(lines: Lines) -> None:
    released = asyncio.Event()

    class Held(ScriptedRuntime):
        async def paused(self) -> None:
            await released.wait()

    runtime = Held([Started(0, 10, 0), Pause(), delta("x"), finished()], answers=_kept)
    with live(Front(runtime)) as server, server.client() as client:
        body = {"input": "hello", "background": True}
        assert client.post("/v1/responses", json=body).status_code == 200
        assert lines.records == []
        server.call(released.set)
        soon(lambda: bool(lines.records))
    assert (lines.only["endpoint"], lines.only["output_tokens"]) == ("/v1/responses", 2)


def _kept(_op: object) -> Any:
    from rekindle.protocol.admin import DocumentStored

    return DocumentStored(kept=True)


def test_successful_probes_are_quiet(lines: Lines) -> None:
    front = Front()
    for path in ("/health", "/health/ready", "/metrics"):
        assert front.get(path).status_code == 200
    assert [record.levelno for record in lines.records] == [logging.DEBUG] * 3
    front.runtime.supervisor.ready = None
    assert front.get("/health").status_code == 503
    assert lines.records[-1].levelno == logging.INFO


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("/v1/v1/chat/completions", "/v1/v1/chat/completions"),
        ("/v1/cache/rk-3fA9", "/v1/cache/*"),
        ("/" + "a" * 40, "/*"),
        ("/ünter", "/*"),
        ("/a\nb", "/*"),
    ],
)
def test_a_path_without_a_route_is_shown_without_keys_and_ids(path: str, shown: str) -> None:
    assert endpoint_of({"path": path}) == shown


def test_a_route_hides_the_ids_in_its_path(lines: Lines) -> None:
    Front().get("/v1/cache/0123456789abcdef")
    assert lines.only["endpoint"] == "/v1/cache/{key}"


def test_gaps_are_counted_by_their_upper_bound() -> None:
    record = RequestRecord("r", "GET", "/")
    for gap_s in (0.0, 0.001, 0.0011, 100.0):
        record.add_gap(gap_s)
    assert (record.gaps[0], record.gaps[1], record.gaps[-1]) == (2, 1, 1)
    assert len(record.gaps) == len(GAP_BOUNDS_S) + 1


def test_a_turn_without_a_second_token_has_no_speed() -> None:
    record = RequestRecord("r", "POST", CHAT, turns=1, output_tokens=1, decode_s=0.0)
    assert record.tokens_per_s is None
    assert "tok/s" not in record.line()


def test_progress_does_not_count_as_a_part(lines: Lines) -> None:
    Front(ScriptedRuntime([Started(0, 10, 0), Prefill(0, 5, 10), *reply("x")[1:]])).chat()
    assert lines.only["output_tokens"] == 1
