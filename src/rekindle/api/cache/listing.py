"""GET /v1/cache: the entries, a page at a time."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Sequence
from heapq import merge
from itertools import islice
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel
from starlette.requests import Request

from rekindle.api.cache.schema import EntryBody, entry_body
from rekindle.errors import BadRequest
from rekindle.protocol.admin import EntryInfo, EntryList, ListEntries
from rekindle.server.admin_client import AdminClient
from rekindle.server.models import ModelNumber, models_of

PAGE_ENTRIES = 100
MOST_PAGE_ENTRIES = 1000
AT_END = 0  # a position that nothing is below

_CURSOR = re.compile(r"\d{1,18}(\.\d{1,18})*")

router = APIRouter(tags=["cache"])

Limit = Annotated[
    int, Query(ge=1, le=MOST_PAGE_ENTRIES, description="How many entries a page has at most.")
]
After = Annotated[str | None, Query(description="`next` of the page before; none: the first page.")]


class Listing(BaseModel):
    """A page of entries; with `has_more`, the next one is `?after=` its `next`."""

    entries: list[EntryBody]
    count: int  # in this page
    has_more: bool
    next: str | None


@router.get("/v1/cache", response_model_exclude_unset=True)
async def list_entries(
    request: Request, number: ModelNumber = None, limit: Limit = PAGE_ENTRIES, after: After = None
) -> Listing:
    """The entries of all models, or of the numbered one; most recently used first."""
    models = models_of(request)
    client = AdminClient.of(request)
    runtimes = models.chosen(number)
    positions = _positions(after, len(runtimes))
    pages = await asyncio.gather(
        *(
            client.request(runtime, ListEntries(limit=limit, before=position), EntryList)
            for runtime, position in zip(runtimes, positions, strict=True)
        )
    )
    listed = _merged(pages, limit)
    taken = Counter(place for place, _ in listed)
    rest = [_position(page, taken[place]) for place, page in enumerate(pages)]
    has_more = any(position != AT_END for position in rest)
    return Listing(
        entries=[
            entry_body(info, runtimes[place].name, admin=client.is_admin) for place, info in listed
        ],
        count=len(listed),
        has_more=has_more,
        next=".".join(map(str, rest)) if has_more else None,
    )


def _merged(pages: Sequence[EntryList], limit: int) -> list[tuple[int, EntryInfo]]:
    """The first entries of all pages together, each with the number of its page; those of one page
    stay in its order."""
    numbered = ([(place, info) for info in page.entries] for place, page in enumerate(pages))
    return list(islice(merge(*numbered, key=lambda each: -each[1].last_used), limit))


def _position(page: EntryList, taken: int) -> int:
    """From where on the next page goes on, after so many of this one."""
    if taken < len(page.entries):
        return page.entries[taken].place + 1
    return AT_END if page.next is None else page.next


def _positions(after: str | None, count: int) -> Sequence[int | None]:
    """Where each model's entries go on; None: from the top."""
    if after is None:
        return [None] * count
    parts = after.split(".") if _CURSOR.fullmatch(after[:4096]) else []
    if len(parts) != count:
        raise BadRequest("`after` takes the `next` of the page before this one.", param="after")
    return [int(part) for part in parts]
