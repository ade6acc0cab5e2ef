"""Responses that are being computed, so that other requests can see and cancel them."""

from __future__ import annotations

from typing import Any, Protocol

OPEN_RESPONSES = "open_responses"  # in the state of the application


class OpenResponse(Protocol):
    async def cancel(self) -> dict[str, Any]:
        """End it as it is; the response."""

    def so_far(self) -> dict[str, Any]: ...


class OpenResponses:
    """Of all callers; each sees its own."""

    def __init__(self) -> None:
        self._answers: dict[tuple[bytes, str], OpenResponse] = {}

    def add(self, tenant: bytes, key: str, answer: OpenResponse) -> None:
        self._answers[tenant, key] = answer

    def drop(self, tenant: bytes, key: str) -> None:
        self._answers.pop((tenant, key), None)

    def find(self, tenant: bytes, key: str) -> OpenResponse | None:
        return self._answers.get((tenant, key))
