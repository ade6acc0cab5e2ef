"""Errors in Ollama's shape, and the lines of its streams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from pydantic import BaseModel

from rekindle.errors import ServerError
from rekindle.server.responses import ErrorFormat, documented

ROOT = "/api/"


class OllamaErrorBody(BaseModel):
    """The body of every error under /api, for the OpenAPI page."""

    error: str


def speaks_ollama(path: str) -> bool:
    """Whether a request is in this dialect."""
    return path.startswith(ROOT)


def line(payload: Mapping[str, Any]) -> bytes:
    """One line of a stream: NDJSON."""
    return orjson.dumps(payload, option=orjson.OPT_APPEND_NEWLINE)


def error_body(error: ServerError) -> Mapping[str, Any]:
    return {"error": str(error)}


# The answers of a route that streams unless it is asked not to, as FastAPI takes them.
RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Its lines as NDJSON; with `stream: false` the whole answer",
        "content": {"application/x-ndjson": {"schema": {"type": "string"}}},
    },
    **documented(400, model=OllamaErrorBody),
}
OLLAMA_ERRORS = ErrorFormat(body=error_body, event=lambda error: line(error_body(error)))
