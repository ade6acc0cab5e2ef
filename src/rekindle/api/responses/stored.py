"""Stores responses and conversations as documents in a model's runtime.

A document has one line for each item and a last line for the object. The document of a
conversation's next turn thus starts with the previous one, and on disk they share blocks.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal
from weakref import WeakValueDictionary

import orjson
from fastapi import Query
from starlette.requests import Request

from rekindle.api.base.admin import AdminClient
from rekindle.api.base.fields import MAX_ID_CHARACTERS
from rekindle.api.base.models import models_of
from rekindle.api.responses.items import new_id, stored_items
from rekindle.errors import BadRequest, CacheKeyNotFound, ServerError
from rekindle.http.auth import caller_of
from rekindle.protocol.admin import (
    DeleteEntry,
    Document,
    DocumentStored,
    GetDocument,
    Removed,
    StoreDocument,
)
from rekindle.worker.client import RuntimeClient

MAX_DOCUMENT_BYTES = 32 << 20
# Documents that a tenant transfers concurrently. Others wait, because a runtime refuses more than
# four times as many admin requests.
MAX_CONCURRENT = 16
DOCUMENT_SLOTS = "document_slots"  # key in the application's state

Lines = tuple[bytes, ...]
DocumentSlots = WeakValueDictionary[bytes, asyncio.Semaphore]  # by tenant


@dataclass(frozen=True, slots=True)
class Stored:
    """A document and the runtime that stores it."""

    key: str
    runtime: RuntimeClient
    lines: Lines  # its items, as JSON
    object: dict[str, Any]

    @classmethod
    def parse(cls, runtime: RuntimeClient, document: Document) -> Stored:
        *lines, last = document.content.split(b"\n")
        return cls(document.key, runtime, tuple(lines), orjson.loads(last))

    @property
    def history(self) -> Lines:
        """All items, including the output of a response."""
        return (*self.lines, *as_lines(self.object.get("output", ())))

    @property
    def size_bytes(self) -> int:
        return size_bytes(self.lines)


def size_bytes(lines: Lines) -> int:
    return sum(map(len, lines))


def as_lines(items: Iterable[dict[str, Any]]) -> Lines:
    return tuple(orjson.dumps(item) for item in items)


def with_new_ids(before: Lines, added: Lines) -> Lines:
    """Replace the ids of added items that are already taken."""
    taken = {orjson.loads(line)["id"] for line in before}
    items = [orjson.loads(line) for line in added]
    return as_lines(
        {**item, "id": new_id(item["type"])} if item["id"] in taken else item for item in items
    )


def place_of(item_id: str, lines: Sequence[bytes]) -> int | None:
    """Find the line of an item. Only lines that contain its id are parsed."""
    try:
        written = orjson.dumps(item_id)
    except orjson.JSONEncodeError:  # a lone surrogate, which no id has
        return None
    may_be = (place for place, line in enumerate(lines) if written in line)
    return next((place for place in may_be if orjson.loads(lines[place])["id"] == item_id), None)


def parsed(lines: Sequence[bytes]) -> list[Any]:
    return stored_items.validate_python([orjson.loads(line) for line in lines])


class DocumentClient:
    """Loads and stores the documents of one caller."""

    def __init__(self, request: Request) -> None:
        slots: DocumentSlots = getattr(request.state, DOCUMENT_SLOTS)
        tenant = caller_of(request).salt
        self._slots = slots.setdefault(tenant, asyncio.Semaphore(MAX_CONCURRENT))
        self._admin = AdminClient.of_tenant(request)
        self._runtimes = models_of(request).runtimes

    async def load(self, key: str, missing: ServerError) -> Stored:
        """Raises `missing` if no runtime has the document."""
        try:
            async with self._slots:
                found = await self._admin.find(self._runtimes, GetDocument(key), Document)
        except ServerError as error:
            raise missing if error.code == CacheKeyNotFound.code else error from None
        return Stored.parse(*found)

    async def save(
        self,
        runtime: RuntimeClient,
        key: str,
        lines: Lines,
        object_: dict[str, Any],
        *,
        ttl_s: float | None = None,
    ) -> bool:
        """Store a document. Returns False if there is no room for it.

        After two seconds this stops waiting for the disk. The document is in memory by then.
        """
        content = b"\n".join((*lines, orjson.dumps(object_)))
        if len(content) > MAX_DOCUMENT_BYTES:
            return False
        op = StoreDocument(key=key, content=content, ttl_s=ttl_s)
        async with self._slots:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(2.0):
                    return (await self._admin.request(runtime, op, DocumentStored)).kept
        return True

    async def delete(self, stored: Stored) -> None:
        """Delete a document durably, with the state that only it uses."""
        async with self._slots:
            await self._admin.request(stored.runtime, DeleteEntry(stored.key), Removed)


Limit = Annotated[int, Query(ge=1, le=100)]
Order = Annotated[Literal["asc", "desc"], Query(description="desc: newest first")]
After = Annotated[
    str | None,
    Query(max_length=MAX_ID_CHARACTERS, description="The id of the last item of the previous page"),
]


def page_of(lines: Lines, *, limit: int, order: str, after: str | None) -> dict[str, Any]:
    ordered = [orjson.loads(line) for line in (lines if order == "asc" else reversed(lines))]
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
