"""Defines the errors of the Responses API and their format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rekindle.errors import BadRequest, ServerError, UnknownId
from rekindle.http.responses import ErrorFormat, sse_event

ROOTS = ("/v1/responses", "/v1/conversations")
#: Field names in errors of the runtime, and the names of these fields here.
FIELDS = {"messages": "input", "response_format": "text"}


class ResponseNotFound(UnknownId):
    code, field, prefix = "response_not_found", "response_id", "resp_"
    text = "No response {} is stored here: it had `store: false`, was deleted, or has expired."


class PreviousResponseNotFound(ResponseNotFound):
    status, code, field = 400, "previous_response_not_found", "previous_response_id"
    text = (
        f"{ResponseNotFound.text} Send the whole conversation as `input`, without "
        "`previous_response_id`."
    )


class ResponseNotEnded(BadRequest):
    code = "response_not_ended"

    def __init__(self, key: str) -> None:
        super().__init__(
            f"The response {key[:128]!r} is still being computed: continue it when its status is "
            "no longer `queued` or `in_progress`.",
            param="previous_response_id",
        )


class NoRoomForResponse(ServerError):
    status, kind, code = 507, "insufficient_storage_error", "response_too_large"

    def __init__(self) -> None:
        super().__init__(
            "There is no room to store this response, which `background` needs: send less, or "
            "leave `background` out."
        )


class ConversationNotFound(UnknownId):
    code, field, prefix = "conversation_not_found", "conversation", "conv_"
    text = (
        "There is no conversation {}: create one with POST /v1/conversations, or send its items "
        "as `input`."
    )


class ItemNotFound(UnknownId):
    code, field = "item_not_found", "item_id"
    text = "The conversation has no item {}; GET …/items lists its items."


class ResponseIsEnding(ServerError):
    status, kind, code = 409, "invalid_request_error", "response_is_ending"

    def __init__(self) -> None:
        super().__init__(
            "The response is ending right now: delete it again in a moment.", param="response_id"
        )


def speaks_responses(path: str) -> bool:
    """Whether a request expects errors in the form of this API."""
    return any(path == root or path.startswith(f"{root}/") for root in ROOTS)


def field_of(error: ServerError) -> str | None:
    """The name of the request field that an error is about."""
    return FIELDS.get(error.param or "", error.param)


def _body(error: ServerError) -> Mapping[str, Any]:
    return {"error": {**error.body()["error"], "param": field_of(error)}}


def _event(error: ServerError) -> bytes:
    """An error before the first event of a stream."""
    details = _body(error)["error"]
    # OpenAI's clients read the outer fields, and those of Open Responses the inner ones.
    told = {**details, "type": "error", "sequence_number": 0, "error": details}
    return sse_event("error", told)


RESPONSES_ERRORS = ErrorFormat(body=_body, event=_event)
