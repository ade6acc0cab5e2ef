"""Errors as clients see them: OpenAI's shape, and the headers that go with a status."""

from __future__ import annotations

from pydantic import BaseModel

from rekindle.errors import ServerError
from rekindle.server.json import JsonResponse

RETRY_SOON = {"retry-after": "1"}
HEADERS = {
    401: {"www-authenticate": "Bearer"},
    408: {"connection": "close"},
    429: RETRY_SOON,
    503: RETRY_SOON,
}


class ErrorDetails(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """What every error looks like."""

    error: ErrorDetails


class ErrorResponse(JsonResponse):
    def __init__(self, error: ServerError) -> None:
        super().__init__(error.body(), status_code=error.status, headers=HEADERS.get(error.status))
