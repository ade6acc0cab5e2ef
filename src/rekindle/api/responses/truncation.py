"""`truncation: auto`: the oldest items are left out of a conversation that is too long.

Where it is cut depends on what comes before the cut alone, in steps of some size: so the next turns
of the conversation are cut at the same place, and go on from the same state, until they are too
long for that as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request

from rekindle.api.base.admin import AdminClient
from rekindle.api.base.messages import Message
from rekindle.api.responses.items import (
    CallOutput,
    CustomToolCall,
    FunctionCall,
    MessageItem,
    text_of,
)
from rekindle.api.responses.request import Conversation, token_question
from rekindle.api.responses.schema import PromptFields
from rekindle.config import Config
from rekindle.errors import ContextTooLong, ServerError
from rekindle.http.body import run_off_loop_if_large
from rekindle.protocol.admin import Tokenize, Tokenized
from rekindle.worker.client import RuntimeClient

STEPS = 2  # between two cuts there are at least so many parts of the context, in characters


async def fitted(
    request: Request,
    runtime: RuntimeClient,
    body: PromptFields,
    conversation: Conversation,
    config: Config,
) -> Conversation:
    """The conversation as far as the model's context holds it, if that is what is asked for; one
    that does not fit with the user's last message alone is cut to that, and refused as any other.
    """
    if body.truncation != "auto":
        return conversation
    limit = runtime.loaded.context_tokens
    reserved = min(body.reserved_tokens, limit // STEPS)
    size_bytes = len(await request.body()) + conversation.size_bytes

    def question(begin: int) -> Tokenize:
        return token_question(body, _texts(conversation.cut(begin)), None, config)

    async def fits(begin: int) -> bool:
        asked = await run_off_loop_if_large(request, size_bytes, question, begin)
        try:
            found = await AdminClient.of_tenant(request).request(runtime, asked, Tokenized)
        except ServerError as error:
            if error.code != ContextTooLong.code:
                raise
            return False
        return found.count + reserved <= limit

    if await fits(0):
        return conversation
    cuts = await run_off_loop_if_large(
        request, size_bytes, _cuts, conversation.items, step=max(limit // STEPS, 1)
    )
    least, most = 0, len(cuts) - 1
    while least < most:  # the first cut behind which it fits
        middle = (least + most) // 2
        if await fits(cuts[middle]):
            most = middle
        else:
            least = middle + 1
    if not cuts:
        return conversation
    return await run_off_loop_if_large(request, size_bytes, conversation.cut, cuts[least])


def _cuts(items: Sequence[Any], *, step: int) -> list[int]:
    """Where the conversation may begin instead: at messages of the user, a step apart."""
    cuts, characters, reached = list[int](), 0, 0
    last = None
    for place, item in enumerate(items):
        if isinstance(item, MessageItem) and item.role == "user" and place:
            last = place
            if characters - reached >= step:
                reached, last = characters, None
                cuts.append(place)
        characters += _characters(item)
    return cuts if last is None else [*cuts, last]  # at least the last message


def _characters(item: Any) -> int:
    match item:
        case MessageItem():
            return len(_written(item.content))
        case CallOutput():
            return len(_written(item.output))
        case FunctionCall():
            return len(item.arguments)
        case CustomToolCall():
            return len(item.input)
    return 0


def _written(content: Any) -> str:
    parts = content if isinstance(content, str) else [p for p in content if hasattr(p, "text")]
    return text_of(parts)


def _texts(conversation: Conversation) -> Conversation:
    """Without pictures, which are loaded later."""
    return conversation.with_messages([_text(message) for message in conversation.messages])


def _text(message: Message) -> Message:
    if not message.media:
        return message
    content = message.content if isinstance(message.content, list) else []
    kept = [part for part in content if part.type == "text"]
    return message.model_copy(update={"content": kept})
