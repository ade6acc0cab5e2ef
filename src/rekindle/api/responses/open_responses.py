"""Responses that are being computed, so that another request can cancel them."""

from __future__ import annotations

from typing import Any, Protocol

OPEN_RESPONSES = "open_responses"  # in the state of the application


class Cancellable(Protocol):
    async def cancel(self) -> dict[str, Any]:
        """End it as it is; the response."""


class OpenResponses:
    """Of all callers; each sees its own."""

    def __init__(self) -> None:
        self._answers: dict[tuple[bytes, str], Cancellable] = {}

    def add(self, tenant: bytes, key: str, answer: Cancellable) -> None:
        self._answers[tenant, key] = answer

    def drop(self, tenant: bytes, key: str) -> None:
        self._answers.pop((tenant, key), None)

    def find(self, tenant: bytes, key: str) -> Cancellable | None:
        return self._answers.get((tenant, key))
