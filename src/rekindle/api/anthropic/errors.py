"""Formats errors as Anthropic's API does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel
from starlette.datastructures import Headers

from rekindle.errors import BadRequest, ServerError, UnknownId
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


class ThreadNotFound(UnknownId):
    code, field, prefix = "thread_not_found", "thread", "msg_"
    text = (
        "No thread that ends with the message {} is stored here: it was not created with `thread`, "
        'or it has expired. Send the whole conversation with `thread: {{"type": "create"}}`.'
    )


class ThreadFieldsChanged(BadRequest):
    code = "thread_fingerprint_mismatch"

    def __init__(self, names: list[str]) -> None:
        changed = " and ".join(f"`{name}`" for name in names)
        super().__init__(
            f"{changed} cannot change in a thread: leave the field out, or send the whole "
            'conversation with `thread: {"type": "create"}`.',
            param="thread",
        )


#: Codes that clients act on. Anthropic sends them as `error_code` in `details`.
DETAILED = (ThreadNotFound.code, ThreadFieldsChanged.code)


class ErrorDetails(BaseModel):
    type: str
    message: str
    details: dict[str, str] | None = None


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
    told: dict[str, Any] = {"type": kind, "message": _message(error)}
    if error.code in DETAILED:
        told["details"] = {"error_code": error.code}
    return {"type": "error", "error": told, "request_id": current_id()}


def _message(error: ServerError) -> str:
    """Word a context overflow as Anthropic does: clients look for it and shorten the prompt."""
    if error.tokens is not None and error.limit is not None:
        return f"prompt is too long: {error.tokens} tokens > {error.limit} maximum"
    return str(error)


ANTHROPIC_ERRORS = ErrorFormat(
    body=error_body, event=lambda error: sse_event("error", error_body(error))
)
