"""Errors of the Responses API: OpenAI's shape, and in a stream an event."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rekindle.errors import BadRequest, NotFound, ServerError
from rekindle.http.responses import ErrorFormat, sse_event

ROOTS = ("/v1/responses", "/v1/conversations")
#: What a runtime calls a field, by its name here.
FIELDS = {"messages": "input", "response_format": "text"}


class ResponseNotFound(NotFound):
    code = "response_not_found"

    def __init__(self, key: str) -> None:
        super().__init__(
            f"No response {key[:128]!r} is stored here: it was not to be stored, was deleted, or "
            "was not used for a long time.",
            param="response_id",
        )


class ResponseIsEnding(ServerError):
    status, kind, code = 409, "invalid_request_error", "response_is_ending"

    def __init__(self) -> None:
        super().__init__(
            "The response is just ending: delete it again in a moment.", param="response_id"
        )


class PreviousResponseNotFound(BadRequest):
    code = "previous_response_not_found"

    def __init__(self, key: str) -> None:
        super().__init__(
            f"No response {key[:128]!r} is stored here: it was not to be stored, was deleted, or "
            "was not used for a long time. Send the whole conversation as `input`, without "
            "`previous_response_id`.",
            param="previous_response_id",
        )


class ConversationNotFound(NotFound):
    code = "conversation_not_found"

    def __init__(self, key: str) -> None:
        super().__init__(
            f"There is no conversation {key[:128]!r}: make one with POST /v1/conversations, or "
            "send its items as `input`.",
            param="conversation",
        )


def speaks_responses(path: str) -> bool:
    """Whether a request is in this dialect."""
    return any(path == root or path.startswith(f"{root}/") for root in ROOTS)


def field_of(error: ServerError) -> str | None:
    """The request's field that an error is about, as it is called here."""
    return FIELDS.get(error.param or "", error.param)


def _body(error: ServerError) -> Mapping[str, Any]:
    return {"error": {**error.body()["error"], "param": field_of(error)}}


def _event(error: ServerError) -> bytes:
    """Of a stream that has not begun."""
    told = {**_body(error)["error"], "type": "error", "sequence_number": 0}
    return sse_event("error", told)


RESPONSES_ERRORS = ErrorFormat(body=_body, event=_event)
