"""Stores chat completions that ask for it with `store: true`, and lists, shows and deletes them.

A completion is a document under its own id. Its lines are the messages that it answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from rekindle.api.base.admin import durability
from rekindle.api.base.documents import (
    STORED_S,
    DocumentClient,
    Page,
    PageQuery,
    Stored,
    as_lines,
    list_page,
    tried,
)
from rekindle.api.base.fields import Metadata, StrictModel
from rekindle.api.base.messages import Message
from rekindle.errors import BadRequest, ServerError, UnknownId
from rekindle.http.body import JsonRoute, run_off_loop
from rekindle.http.responses import JsonResponse, documented, while_connected
from rekindle.worker.client import RuntimeClient

ROOT = "/v1/chat/completions"
ONE = f"{ROOT}/{{completion_id}}"
#: Fields of the request that a stored completion shows.
SHOWN = (
    *("seed", "top_p", "temperature", "presence_penalty", "frequency_penalty", "tool_choice"),
    *("tools", "response_format"),
)
HIDDEN = ("x_cache", "timings", "__verbose")  # parts of an answer that are about its computation

router = APIRouter(route_class=JsonRoute, tags=["chat"])


class CompletionNotFound(UnknownId):
    code, field, prefix = "completion_not_found", "completion_id", "chatcmpl-"
    text = (
        "No chat completion {} is stored here: it was created without `store: true`, was deleted, "
        "or has expired."
    )


class NoRoomForChange(ServerError):
    status, kind, code = 507, "insufficient_storage_error", "completion_too_large"

    def __init__(self) -> None:
        super().__init__("There is no room to store this change: delete other completions first.")


async def keep(
    http: Request,
    runtime: RuntimeClient,
    messages: Sequence[Message],
    completion: dict[str, Any],
    asked: dict[str, Any],
) -> dict[str, Any]:
    """Store a completion with its messages. Returns what the answer says about that.

    If storing fails, `store` is false there and the answer is sent anyway.
    """
    key = completion["id"]
    lines = await run_off_loop(http, _message_lines, key, messages)
    shown = {name: value for name, value in completion.items() if name not in HIDDEN}
    fields = {name: asked.get(name) for name in SHOWN}
    document = {**shown, **fields, "metadata": asked.get("metadata") or {}}
    saved = await tried(DocumentClient(http).save(runtime, key, lines, document, ttl_s=STORED_S))
    if saved is None or not saved.kept:
        return {"store": False}
    return {"store": True, **durability(saved)}


def _message_lines(key: str, messages: Sequence[Message]) -> tuple[bytes, ...]:
    return as_lines(_shown_message(f"{key}-{place}", each) for place, each in enumerate(messages))


def _shown_message(message_id: str, message: Message) -> dict[str, Any]:
    """A message as OpenAI lists it: `content` is text, and `content_parts` has any parts."""
    fields = message.model_dump(exclude_unset=True, exclude={"message_id"})
    content = fields.get("content")
    parts = content if isinstance(content, list) else None
    return {
        "id": message_id,
        "name": None,
        **fields,
        "content": None if parts else content,
        "content_parts": parts,
    }


@router.get(ROOT)
async def list_completions(request: Request, page: PageQuery, model: str | None = None) -> Response:
    """List stored chat completions. `metadata[NAME]=VALUE` selects those with this metadata."""
    wanted = _wanted_metadata(request)
    return JsonResponse(await while_connected(request, _page(request, page, model, wanted)))


def _wanted_metadata(request: Request) -> dict[str, str]:
    parameters = request.query_params.items()
    return {
        name.removeprefix("metadata[").removesuffix("]"): value
        for name, value in parameters
        if name.startswith("metadata[") and name.endswith("]")
    }


async def _page(
    request: Request, page: Page, model: str | None, metadata: dict[str, str]
) -> dict[str, Any]:
    """Load completions, oldest or newest first, until the page is full."""
    documents = DocumentClient(request)
    keys = await documents.keys(CompletionNotFound.prefix)
    ordered = keys if page.order == "asc" else keys[::-1]
    if page.after is not None:
        if page.after not in ordered:
            raise BadRequest(
                f"`after` takes the id of a stored completion, not {page.after[:128]!r}.",
                param="after",
            )
        ordered = ordered[ordered.index(page.after) + 1 :]
    found: list[dict[str, Any]] = []
    for key in ordered:
        if len(found) > page.limit:  # one more than the page has shows that there is a next page
            break
        completion = await documents.object(key, CompletionNotFound)
        if completion is not None and _matches(completion, model, metadata):
            found.append(completion)
    shown = found[: page.limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(found) > len(shown),
    }


def _matches(completion: dict[str, Any], model: str | None, metadata: dict[str, str]) -> bool:
    has_model = model in (None, completion["model"])
    return has_model and metadata.items() <= completion["metadata"].items()


@router.get(ONE)
async def retrieve_completion(completion_id: str, request: Request) -> Response:
    """Show a stored chat completion."""
    return JsonResponse((await _stored(request, completion_id)).object)


@router.get(f"{ONE}/messages")
async def list_messages(completion_id: str, request: Request, page: PageQuery) -> Response:
    """List the messages that a stored chat completion answers."""
    lines = (await _stored(request, completion_id)).lines
    if "order" not in request.query_params:
        page = page.model_copy(update={"order": "asc"})  # as OpenAI does
    return await list_page(request, lines, page)


class ChangeRequest(StrictModel):
    metadata: Metadata | None


@router.post(ONE, responses=documented(507))
async def change_completion(completion_id: str, body: ChangeRequest, request: Request) -> Response:
    """Replace the metadata of a stored chat completion."""
    stored = await _stored(request, completion_id)
    changed = {**stored.object, "metadata": body.metadata or {}}
    saved = await DocumentClient(request).save(stored.runtime, completion_id, stored.lines, changed)
    if not saved.kept:
        raise NoRoomForChange
    return JsonResponse({**changed, **durability(saved)})


@router.delete(ONE)
async def delete_completion(completion_id: str, request: Request) -> Response:
    """Delete a stored chat completion."""
    removed = await DocumentClient(request).delete(await _stored(request, completion_id))
    deleted = {"id": completion_id, "object": "chat.completion.deleted", "deleted": True}
    return JsonResponse({**deleted, **durability(removed)})


async def _stored(request: Request, key: str) -> Stored:
    return await DocumentClient(request).load(key, CompletionNotFound)
