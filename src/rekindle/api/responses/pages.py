"""Lists of items, page by page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import orjson
from fastapi import Query

from rekindle.api.fields import MOST_ID_CHARACTERS
from rekindle.api.responses.stored import Lines
from rekindle.errors import BadRequest

Limit = Annotated[int, Query(ge=1, le=100)]
Order = Annotated[Literal["asc", "desc"], Query(description="desc: the newest first")]
After = Annotated[
    str | None,
    Query(max_length=MOST_ID_CHARACTERS, description="The id that the page begins behind"),
]


def page_of(lines: Lines, *, limit: int, order: str, after: str | None) -> dict[str, Any]:
    """A page of a document's items."""
    return page(list(map(orjson.loads, lines)), limit=limit, order=order, after=after)


def page(
    items: Sequence[dict[str, Any]], *, limit: int, order: str, after: str | None
) -> dict[str, Any]:
    ordered = list(items) if order == "asc" else list(reversed(items))
    start = 0
    if after is not None:
        places = (place for place, item in enumerate(ordered) if item.get("id") == after)
        found = next(places, None)
        if found is None:
            raise BadRequest(
                f"`after` takes the id of an item of this list, not {after[:128]!r}.", param="after"
            )
        start = found + 1
    shown = ordered[start : start + limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": start + limit < len(ordered),
    }
