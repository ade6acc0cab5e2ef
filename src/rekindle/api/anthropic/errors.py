"""Formats errors as Anthropic's API does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel
from starlette.datastructures import Headers

from rekindle.errors import ServerError
from rekindle.http.logs import current_id
from rekindle.http.responses import ErrorFormat, sse_event

VERSION = "anthropic-version"  # header that every client of this API sends
ROOT = "/v1/messages"
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class ErrorDetails(BaseModel):
    type: str
    message: str


class AnthropicErrorBody(BaseModel):
    """The body of an error of /v1/messages, for the OpenAPI document."""

    type: Literal["error"]
    error: ErrorDetails
    request_id: str | None


def speaks_anthropic(path: str, headers: Headers) -> bool:
    """Whether a request expects errors in Anthropic's form."""
    return path == ROOT or path.startswith(f"{ROOT}/") or VERSION in headers


def error_body(error: ServerError) -> Mapping[str, Any]:
    kind = TYPES.get(error.status)
    if kind is None:
        kind = "invalid_request_error" if error.status < 500 else "api_error"
    return {
        "type": "error",
        "error": {"type": kind, "message": _message(error)},
        "request_id": current_id(),
    }


def _message(error: ServerError) -> str:
    """Word a context overflow as Anthropic does: clients look for it and shorten the prompt."""
    if error.tokens is not None and error.limit is not None:
        return f"prompt is too long: {error.tokens} tokens > {error.limit} maximum"
    return str(error)


ANTHROPIC_ERRORS = ErrorFormat(
    body=error_body, event=lambda error: sse_event("error", error_body(error))
)
