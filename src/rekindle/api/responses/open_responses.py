"""Responses that are being computed, so that other requests can see and cancel them."""

from __future__ import annotations

from typing import Any, Protocol

from rekindle.api.responses.stored import Lines

OPEN_RESPONSES = "open_responses"  # in the state of the application


class OpenResponse(Protocol):
    async def cancel(self) -> dict[str, Any]:
        """End it as it is; the response."""

    def discard(self) -> bool:
        """End it, and keep nothing of it; False: it is ending, and may be kept."""

    def so_far(self) -> dict[str, Any]: ...

    @property
    def input_lines(self) -> Lines:
        """The items that it answers."""


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
