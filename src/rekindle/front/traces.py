"""Sends a trace of every request to an OpenTelemetry collector, if one is configured.

A span is made when its request has ended, with the attributes of OpenTelemetry's conventions for
generative AI. So tracing adds nothing to a token, and nothing at all while it is off: the packages
are imported only when they are needed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any

from rekindle.config import Config
from rekindle.errors import ConfigError
from rekindle.http.records import RequestRecord
from rekindle.version import __version__

CLOSE_S = 2.0  # how long a stopping server waits for the collector
ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
#: What an endpoint does, in OpenTelemetry's words.
OPERATIONS = {
    "/v1/completions": "text_completion",
    "/completion": "text_completion",
    "/infill": "text_completion",
    "/api/generate": "text_completion",
    "/v1/embeddings": "embeddings",
    "/api/embed": "embeddings",
    "/embedding": "embeddings",
    "/v1/rerank": "rerank",
}


def open_tracer(config: Config, environment: Mapping[str, str] | None = None) -> Tracer | None:
    """Return None unless a flag or OpenTelemetry's own variables name a collector."""
    environment = os.environ if environment is None else environment
    is_off = environment.get("OTEL_SDK_DISABLED", "").lower() == "true"
    named = config.otlp_endpoint or any(environment.get(name) for name in ENDPOINT_VARIABLES)
    exporter = environment.get("OTEL_TRACES_EXPORTER", "otlp")
    if is_off or not named or exporter == "none":
        return None
    try:
        return Tracer(config.otlp_endpoint)
    except ImportError:
        raise ConfigError(
            "traces need the packages of OpenTelemetry: install `rekindle[otel]`, or unset "
            f"--otlp-endpoint and {ENDPOINT_VARIABLES[1]}"
        ) from None


class Tracer:
    """Makes a span for each request, and sends them in batches from a thread of its own."""

    def __init__(self, endpoint: str | None) -> None:
        """Without an endpoint, the exporter reads OpenTelemetry's variables."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        url = None if endpoint is None else f"{endpoint.rstrip('/')}/v1/traces"
        service = {"service.name": "rekindle", "service.version": __version__}
        resource = Resource.create(service)  # OTEL_SERVICE_NAME is stronger
        if name := os.environ.get("OTEL_SERVICE_NAME"):
            resource = resource.merge(Resource({"service.name": name}))
        self._provider = TracerProvider(resource=resource)
        self._exporter = OTLPSpanExporter(endpoint=url)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("rekindle", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def observe(self, record: RequestRecord) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode

        operation = OPERATIONS.get(record.endpoint, "chat")
        name = (
            f"{operation} {record.model}" if record.turns else f"{record.method} {record.endpoint}"
        )
        begun_ns = int(record.started_at * 1e9)
        span = self._tracer.start_span(
            name,
            context=self._propagator.extract(record.headers),
            kind=SpanKind.SERVER,
            attributes=_attributes(record, operation),
            start_time=begun_ns,
        )
        if record.first_token_s is not None:
            at_ns = begun_ns + int(record.first_token_s * 1e9)
            span.add_event("gen_ai.first_token", timestamp=at_ns)
        if record.error is not None or record.status >= 500:
            span.set_status(Status(StatusCode.ERROR, record.error))
        span.end(begun_ns + int(record.total_s * 1e9))

    def close(self) -> None:
        """Send the spans that are still waiting, unless the collector does not answer."""
        sending = threading.Thread(target=self._provider.shutdown, daemon=True)
        sending.start()
        sending.join(CLOSE_S)
        if sending.is_alive():
            self._exporter.shutdown()  # type: ignore[no-untyped-call]  # ends its retries
            sending.join(CLOSE_S)


def _attributes(record: RequestRecord, operation: str) -> dict[str, Any]:
    """The attributes of a span. None of them has content of the request or of the reply."""
    found: dict[str, Any] = {
        "http.request.method": record.method,
        "http.route": record.endpoint,
        "http.response.status_code": record.status,
        "rekindle.request_id": record.request_id,
        "rekindle.tenant": record.tenant or None,
        "error.type": record.error,
    }
    if record.turns:
        found |= {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "rekindle",
            "gen_ai.request.model": record.model,
            "gen_ai.response.model": record.model,
            "gen_ai.usage.input_tokens": record.prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": record.reused_tokens,
            "gen_ai.usage.output_tokens": record.output_tokens,
            "gen_ai.response.finish_reasons": [record.finish] if record.finish else None,
            "gen_ai.server.time_to_first_token": record.first_token_s,
            "rekindle.cache.tier": record.tier,
            "rekindle.cache.reason": record.reuse or None,
        }
    return {name: value for name, value in found.items() if value is not None}
