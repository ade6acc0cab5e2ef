"""Implements threads: a request continues a stored conversation and sends only its new messages.

A thread is a document under the id of its last message. It holds the messages, the system prompt
and the tools, so that continuing it gives the same prompt as sending the whole conversation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson
from starlette.requests import Request

from rekindle.api.anthropic.errors import ThreadFieldsChanged, ThreadNotFound
from rekindle.api.anthropic.schema import MessagesRequest, PromptFields, ThreadContinue
from rekindle.api.base.documents import STORED_S, DocumentClient, Lines, Stored, as_lines, tried
from rekindle.api.base.fields import MAX_ITEMS
from rekindle.errors import BadRequest
from rekindle.http.body import run_off_loop_if_large
from rekindle.worker.client import RuntimeClient

CREATE_ONLY = ("system", "tools")  # fields that a thread keeps from its first request


@dataclass(frozen=True, slots=True)
class Thread:
    """The conversation of a request that has a `thread`, without the reply."""

    body: MessagesRequest  # with the whole conversation, its system prompt and its tools
    lines: Lines  # the messages, as they are stored
    fields: dict[str, Any]  # those of CREATE_ONLY, as they are stored
    size_bytes: int  # of the stored part

    async def keep(
        self,
        http: Request,
        runtime: RuntimeClient,
        message_id: str,
        content: list[dict[str, Any]],
    ) -> None:
        """Store the thread with the reply. If that fails, continuing it is an error with a remedy,
        and the reply is sent anyway."""
        lines = (*self.lines, *as_lines([{"role": "assistant", "content": content}]))
        saving = DocumentClient(http).save(
            runtime, message_id, lines, {"id": message_id, **self.fields}, ttl_s=STORED_S
        )
        await tried(saving)


async def thread_of(request: Request, body: MessagesRequest) -> Thread | None:
    """The thread that the request creates or continues, or None.

    Raises ThreadNotFound for an id that is not that of a stored thread's last message.
    """
    if body.thread is None:
        return None
    before = None
    if isinstance(body.thread, ThreadContinue):
        before = await DocumentClient(request).load(body.thread.previous_message_id, ThreadNotFound)
    stored_bytes = before.memory_bytes if before else 0
    size_bytes = len(await request.body()) + stored_bytes
    return await run_off_loop_if_large(request, size_bytes, _joined, body, before, stored_bytes)


def _joined(body: MessagesRequest, before: Stored | None, stored_bytes: int) -> Thread:
    """Put the new messages after the stored ones."""
    sent = body.model_dump(include={"messages", *CREATE_ONLY}, exclude_unset=True)
    own_lines = as_lines(sent.pop("messages"))
    if before is None:
        return Thread(body, own_lines, sent, stored_bytes)
    kept = {name: before.object[name] for name in CREATE_ONLY if name in before.object}
    if changed := [name for name, value in sent.items() if value != kept.get(name)]:
        raise ThreadFieldsChanged(changed)
    if len(before.lines) + len(own_lines) > MAX_ITEMS:
        raise BadRequest(f"A thread has at most {MAX_ITEMS} messages.", param="messages")
    stored = PromptFields.model_validate(
        {"messages": [orjson.loads(line) for line in before.lines], **kept}
    )
    whole = body.model_copy(
        update={
            "messages": [*stored.messages, *body.messages],
            **{name: getattr(stored, name) for name in CREATE_ONLY},
        }
    )
    whole.check_choice()
    return Thread(whole, (*before.lines, *own_lines), kept, stored_bytes)
