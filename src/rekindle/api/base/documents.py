"""Stores documents in a model's runtime: what a dialect keeps of a conversation under an id.

A document has one line for each item or message and a last line for the object. The document of a
conversation's next turn thus starts with the previous one, and on disk they share blocks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar
from weakref import WeakValueDictionary

import orjson
from fastapi import Query
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from rekindle.api.base.admin import AdminClient
from rekindle.api.base.fields import MAX_ID_CHARACTERS
from rekindle.api.base.models import models_of
from rekindle.errors import BadRequest, CacheKeyNotFound, ServerError, Unavailable, UnknownId
from rekindle.http.auth import caller_of
from rekindle.http.body import body_of, run_off_loop_if_large
from rekindle.http.responses import JsonResponse
from rekindle.protocol.admin import (
    DeleteEntry,
    Document,
    DocumentKeys,
    DocumentStored,
    GetDocument,
    ListDocuments,
    Removed,
    StoreDocument,
)
from rekindle.worker.client import RuntimeClient

log = logging.getLogger("rekindle.turn")

STORED_S = 30 * 86_400.0  # lifetime of a stored response or thread that nobody uses
MAX_DOCUMENT_BYTES = 32 << 20
# Documents that a tenant transfers concurrently. Others wait, because a runtime refuses more than
# four times as many admin requests.
MAX_CONCURRENT = 16
MAX_CONCURRENT_LOADS = 4  # each takes memory in both processes before its size is known
DOCUMENT_SLOTS = "document_slots"  # key in the application's state
SAVE_TIMEOUT_S = 10.0  # for a runtime to confirm a document

Lines = tuple[bytes, ...]


class TenantSlots:
    """Limits the documents that one tenant transfers concurrently."""

    def __init__(self) -> None:
        self.all = asyncio.Semaphore(MAX_CONCURRENT)
        self.loads = asyncio.Semaphore(MAX_CONCURRENT_LOADS)


DocumentSlots = WeakValueDictionary[bytes, TenantSlots]  # by tenant


T = TypeVar("T")


class NotStored(ServerError):
    status, kind, code = 503, "server_error", "not_stored"

    def __init__(self) -> None:
        super().__init__(
            f"The model's process did not confirm within {SAVE_TIMEOUT_S:g} seconds that this was "
            "stored. It may be busy or stopped, or its disk may hang: try again later."
        )


@dataclass(frozen=True, slots=True)
class Stored:
    """A document and the runtime that stores it."""

    key: str
    runtime: RuntimeClient
    lines: Lines  # its items, as JSON
    object: dict[str, Any]

    @property
    def memory_bytes(self) -> int:
        """Estimate the memory of the document: its lines, and the items that are parsed from
        them."""
        return 2 * size_bytes(self.lines)


def size_bytes(lines: Lines) -> int:
    return sum(map(len, lines))


def as_lines(items: Iterable[dict[str, Any]]) -> Lines:
    return tuple(orjson.dumps(item) for item in items)


class DocumentClient:
    """Loads and stores the documents of one caller. What it loads counts as memory in flight."""

    def __init__(self, request: Request, *, refuses: bool = True) -> None:
        """With `refuses=False` no load fails for lack of memory, so that an answer can be
        finished."""
        slots: DocumentSlots = getattr(request.state, DOCUMENT_SLOTS)
        tenant = caller_of(request).salt
        self._slots = slots.setdefault(tenant, TenantSlots())
        self._admin = AdminClient.of_tenant(request)
        self._runtimes = models_of(request).loaded_runtimes
        self._body = body_of(request)
        self._refuses = refuses

    async def load(self, key: str, missing: type[UnknownId]) -> Stored:
        """Load a document for as long as the request lasts.

        Raises `missing` if no runtime has the document, or if the key is of another kind.
        """
        stored = await self._load(key, missing)
        self._body.hold(stored.memory_bytes)
        return stored

    @contextlib.asynccontextmanager
    async def loaded(self, key: str, missing: type[UnknownId]) -> AsyncIterator[Stored]:
        """Load a document until the block ends. Raises like `load`."""
        stored = await self._load(key, missing)
        with self._body.holding(stored.memory_bytes, refuses=self._refuses):
            yield stored

    async def object(self, key: str, missing: type[UnknownId]) -> dict[str, Any] | None:
        """Load only the object of a document, for as long as the request lasts. None: it is gone,
        because another request has deleted it."""
        try:
            async with self.loaded(key, missing) as stored:
                self._body.hold(len(orjson.dumps(stored.object)))
                return stored.object
        except UnknownId:
            return None

    async def _load(self, key: str, missing: type[UnknownId]) -> Stored:
        if not key.startswith(missing.prefix):
            raise missing(key)
        try:
            async with self._slots.loads, self._slots.all:
                found = await self._admin.find(self._runtimes, GetDocument(key), Document)
        except ServerError as error:
            raise missing(key) if error.code == CacheKeyNotFound.code else error from None
        runtime, document = found
        *lines, last = document.content.split(b"\n")
        return Stored(document.key, runtime, tuple(lines), orjson.loads(last))

    async def save(
        self,
        runtime: RuntimeClient,
        key: str,
        lines: Lines,
        object_: dict[str, Any],
        *,
        ttl_s: float | None = None,
    ) -> DocumentStored:
        """Store a document, and report what the runtime has confirmed.

        Raises NotStored if the runtime does not answer. It may still store the document later.
        """
        content = b"\n".join((*lines, orjson.dumps(object_)))
        if len(content) > MAX_DOCUMENT_BYTES:
            return DocumentStored(kept=False, durable=False)
        op = StoreDocument(key=key, content=content, ttl_s=ttl_s)
        async with self._slots.all:
            try:
                async with asyncio.timeout(SAVE_TIMEOUT_S):
                    return await self._admin.request(runtime, op, DocumentStored)
            except TimeoutError:
                raise NotStored from None

    async def keys(self, prefix: str) -> list[str]:
        """The keys of all documents that begin with a prefix, oldest first. A model that does not
        answer has none."""
        found: list[tuple[float, str]] = []
        for runtime in self._runtimes:
            with contextlib.suppress(Unavailable):
                listed = await self._admin.request(runtime, ListDocuments(prefix), DocumentKeys)
                found += zip(listed.created_at, listed.keys, strict=True)
        return [key for _, key in sorted(found)]

    async def delete(self, stored: Stored) -> Removed:
        """Delete a document durably, with the state that only it uses."""
        async with self._slots.all:
            return await self._admin.request(stored.runtime, DeleteEntry(stored.key), Removed)


async def tried(saving: Awaitable[T]) -> T | None:
    """Await the storing of an answer. The answer is sent even if that fails."""
    try:
        return await saving
    except ServerError as error:
        log.warning("an answer was not stored: %s", error.code)  # a message may contain a key
        return None


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
