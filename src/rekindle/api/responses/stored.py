"""Reads the items of stored responses and conversations."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import orjson
from starlette.requests import Request

from rekindle.api.base.documents import MAX_DOCUMENT_BYTES, Lines, Stored, as_lines
from rekindle.api.responses.errors import ItemNotFound
from rekindle.api.responses.items import new_id, stored_items


def history_of(stored: Stored) -> Lines:
    """All items of a response or conversation, including the output of a response."""
    return (*stored.lines, *as_lines(stored.object.get("output", ())))


LANE = "rekindle.lane"  # key in the scope of a request that came over a WebSocket


class Lane:
    """One of the conversations that a WebSocket carries at the same time.

    Its last response can be continued on the connection even if it was not stored.
    """

    def __init__(self, unstored: dict[str, Stored]) -> None:
        """`unstored` has the last responses of all lanes of the connection, by id."""
        self._unstored = unstored
        self._last: str | None = None

    def find(self, key: str) -> Stored | None:
        return self._unstored.get(key)

    def keep(self, response: Stored) -> None:
        if self._last is not None:
            self.forget(self._last)
        if response.memory_bytes <= MAX_DOCUMENT_BYTES:
            self._unstored[response.key] = response
            self._last = response.key

    def forget(self, key: str) -> None:
        self._unstored.pop(key, None)


def lane_of(request: Request) -> Lane | None:
    lane: Lane | None = request.scope.get(LANE)
    return lane


def with_new_ids(before: Lines, added: Lines) -> Lines:
    """Replace the ids of added items that are already taken."""
    taken = {orjson.loads(line)["id"] for line in before}
    items = [orjson.loads(line) for line in added]
    return as_lines(
        {**item, "id": new_id(item["type"])} if item["id"] in taken else item for item in items
    )


def place_of(item_id: str, lines: Lines) -> int:
    """Find the line of an item. Only lines that contain its id are parsed."""
    with contextlib.suppress(orjson.JSONEncodeError):  # a lone surrogate, which no id has
        written = orjson.dumps(item_id)
        for place, line in enumerate(lines):
            if written in line and orjson.loads(line)["id"] == item_id:
                return place
    raise ItemNotFound(item_id)


def parsed(lines: Sequence[bytes]) -> list[Any]:
    return stored_items.validate_python([orjson.loads(line) for line in lines])
