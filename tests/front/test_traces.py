"""Traces: a collector gets a span for every request, and without one nothing is imported."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from rekindle.config import Config
from rekindle.front import traces
from rekindle.front.traces import open_tracer
from tests.api.live import live
from tests.api.scripted import HELLO, Front, ScriptedRuntime, failed, finished, hit, reply

CHAT = "/v1/chat/completions"
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Collector:
    """What an OTLP receiver got."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.spans: list[Span] = []
        self.resource: dict[str, Any] = {}

    def take(self, path: str, content: bytes) -> None:
        message = ExportTraceServiceRequest.FromString(content)
        self.paths.append(path)
        for group in message.resource_spans:
            self.resource |= attributes(group.resource.attributes)
            self.spans += [span for scope in group.scope_spans for span in scope.spans]


def attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: value(pair.value) for pair in pairs}


def value(found: AnyValue) -> Any:
    kind = found.WhichOneof("value")
    if kind == "array_value":
        return [value(each) for each in found.array_value.values]
    return getattr(found, str(kind))


@contextmanager
def collecting() -> Iterator[tuple[str, Collector]]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers["content-length"])
            collector.take(self.path, self.rfile.read(length))
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", collector
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(autouse=True)
def no_compression(monkeypatch: pytest.MonkeyPatch) -> None:
    """The receiver of the tests reads plain bodies."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")


def test_a_collector_gets_a_span_for_every_request() -> None:
    ok = reply("a", "b", end=finished(prompt_tokens=50, cache=hit(40)))
    broken = [*ok[:2], failed(503, "server_error", "model_restarting", "it died")]
    with collecting() as (url, collector):
        front = Front(ScriptedRuntime(ok, broken), otlp_endpoint=url, api_key=["the-key"])
        with live(front) as server, server.client() as client:
            client.headers["authorization"] = "Bearer the-key"
            client.post(CHAT, json=HELLO, headers={"traceparent": PARENT})
            client.post(CHAT, json={**HELLO, "stream": True})
            client.get("/v1/models", headers={"authorization": "Bearer wrong"})
    assert set(collector.paths) == {"/v1/traces"}
    assert collector.resource["service.name"] == "rekindle"
    good, bad, refused = collector.spans
    assert good.name == "chat tiny"
    assert good.trace_id.hex() == PARENT.split("-")[1]
    assert good.parent_span_id.hex() == PARENT.split("-")[2]
    found = attributes(good.attributes)
    assert found["gen_ai.operation.name"] == "chat"
    assert found["gen_ai.response.model"] == "tiny"
    assert found["gen_ai.usage.input_tokens"] == 50
    assert found["gen_ai.usage.cache_read.input_tokens"] == 40
    assert found["gen_ai.usage.output_tokens"] == 2
    assert found["gen_ai.response.finish_reasons"] == ["stop"]
    assert found["http.route"] == CHAT
    assert good.end_time_unix_nano >= good.start_time_unix_nano
    assert [event.name for event in good.events] == ["gen_ai.first_token"]
    assert attributes(bad.attributes)["error.type"] == "model_restarting"
    assert bad.status.code == bad.status.STATUS_CODE_ERROR
    assert refused.name == "GET /v1/models"
    assert attributes(refused.attributes)["http.response.status_code"] == 401
    sent = str(collector.spans)
    assert "the-key" not in sent
    assert "hello" not in sent


def test_the_variables_of_opentelemetry_switch_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with collecting() as (url, collector):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        monkeypatch.setenv("OTEL_SERVICE_NAME", "models-of-my-team")
        with live(Front()) as server, server.client() as client:
            client.get("/v1/models")
    assert [span.name for span in collector.spans] == ["GET /v1/models"]
    assert collector.resource["service.name"] == "models-of-my-team"


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"OTEL_SDK_DISABLED": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"},
        {"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"},
    ],
)
def test_it_is_off_unless_a_collector_is_named(environment: dict[str, str]) -> None:
    assert open_tracer(Config(), environment) is None


def test_nothing_of_it_is_imported_while_it_is_off() -> None:
    program = (
        "import sys; from rekindle.config import Config;"
        "import rekindle.front.traces as t; assert t.open_tracer(Config(), {}) is None;"
        "ours = ('opentelemetry.sdk', 'opentelemetry.exporter');"
        "print([name for name in sys.modules if name.startswith(ours)])"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.stdout.strip() == "[]", ran.stderr


def test_a_collector_that_is_gone_does_not_disturb_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(traces, "CLOSE_S", 0.2)
    front = Front(otlp_endpoint="http://127.0.0.1:1")
    assert front.chat().status_code == 200
