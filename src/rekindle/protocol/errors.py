"""An error on its way from a runtime to the front."""

from __future__ import annotations

from msgspec import Struct


class ErrorInfo(Struct, kw_only=True):
    """The fields of OpenAI's error object, and the HTTP status."""

    status: int
    kind: str
    code: str | None
    message: str
    param: str | None = None
    tokens: int | None = None  # of a prompt that is too long, at least
    limit: int | None = None  # that it exceeds
