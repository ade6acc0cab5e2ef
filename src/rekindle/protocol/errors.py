"""An error on its way from a runtime to the front; the one form of it."""

from __future__ import annotations

from msgspec import Struct


class ErrorInfo(Struct, kw_only=True):
    """What a client is told, in OpenAI's fields."""

    status: int
    kind: str
    code: str | None
    message: str
    param: str | None = None
