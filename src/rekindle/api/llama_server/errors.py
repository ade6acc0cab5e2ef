"""Formats errors as llama.cpp's server does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from rekindle.errors import CONTEXT_EXCEEDED, BadRequest, ServerError
from rekindle.http.responses import ErrorFormat, sse_data

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "not_found_error",
    503: "unavailable_error",
}
#: The endpoints that only llama.cpp's server has.
PATHS = ("/completion", "/infill", "/slots", "/props", "/lora-adapters", "/embedding")


class NotSupported(BadRequest):
    """This server does not offer an operation. llama.cpp answers 501, but here 5xx means that the
    server has failed."""

    code = "not_supported"


class ErrorDetails(BaseModel):
    code: int
    message: str
    type: str
    n_prompt_tokens: int | None = None
    n_ctx: int | None = None


class LlamaErrorBody(BaseModel):
    """The body of an error of /completion and its neighbours, for the OpenAPI document."""

    error: ErrorDetails


def speaks_llama_server(path: str) -> bool:
    """Whether a request expects errors in llama.cpp's form."""
    return path in PATHS or path.startswith("/slots/")


def error_body(error: ServerError) -> Mapping[str, Any]:
    kind = "not_supported_error" if isinstance(error, NotSupported) else TYPES.get(error.status)
    if kind is None:
        kind = "invalid_request_error" if error.status < 500 else "server_error"
    details: dict[str, Any] = {"code": error.status, "message": error.message, "type": kind}
    if error.tokens is not None and error.limit is not None:
        details |= {
            "message": f"the request ({error.tokens} tokens) exceeds the available context size "
            f"({error.limit} tokens): shorten it, or raise --max-model-len",
            "type": CONTEXT_EXCEEDED,
            "n_prompt_tokens": error.tokens,
            "n_ctx": error.limit,
        }
    return {"error": details}


LLAMA_ERRORS = ErrorFormat(body=error_body, event=lambda error: sse_data(error_body(error)))
