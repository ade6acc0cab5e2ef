"""Reads the items of stored responses and conversations, and lists them page by page."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import orjson
from fastapi import Query
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from rekindle.api.base.documents import (
    MAX_DOCUMENT_BYTES,
    Lines,
    Stored,
    as_lines,
    size_bytes,
)
from rekindle.api.base.fields import MAX_ID_CHARACTERS
from rekindle.api.responses.errors import ItemNotFound
from rekindle.api.responses.items import new_id, stored_items
from rekindle.errors import BadRequest
from rekindle.http.body import run_off_loop_if_large
from rekindle.http.responses import JsonResponse


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


class Page(BaseModel):
    """The query of a request for a list of items."""

    limit: int = Field(20, ge=1, le=100)
    order: Literal["asc", "desc"] = Field("desc", description="desc: newest first")
    after: str | None = Field(
        None,
        max_length=MAX_ID_CHARACTERS,
        description="The id of the last item of the previous page",
    )


PageQuery = Annotated[Page, Query()]


async def list_page(request: Request, lines: Lines, page: Page) -> Response:
    size = size_bytes(lines)
    shown = await run_off_loop_if_large(request, size, page_of, lines, **page.model_dump())
    return JsonResponse(shown)


def page_of(lines: Lines, *, limit: int, order: str, after: str | None) -> dict[str, Any]:
    ordered = [orjson.loads(line) for line in (lines if order == "asc" else reversed(lines))]
    start = 0
    if after is not None:
        ids = [item.get("id") for item in ordered]
        if after not in ids:
            raise BadRequest(
                f"`after` takes the id of an item of this list, not {after[:128]!r}.", param="after"
            )
        start = ids.index(after) + 1
    shown = ordered[start : start + limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": start + limit < len(ordered),
    }
