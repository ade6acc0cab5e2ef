"""Implements `truncation: auto`: drops the oldest items of a conversation that is too long.

Cuts are possible only at fixed steps, which depend on the items before them alone. The next turns
of the conversation are therefore cut at the same item and reuse the same state, until they are too
long again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from starlette.requests import Request

from rekindle.api.base.admin import AdminClient
from rekindle.api.base.messages import Message, rendered
from rekindle.api.base.request import RenderedChat
from rekindle.api.responses.items import (
    CallOutput,
    CompactionItem,
    CustomToolCall,
    FunctionCall,
    MessageItem,
    TextPart,
)
from rekindle.api.responses.request import Conversation, count_request
from rekindle.api.responses.schema import PromptFields
from rekindle.config import Config
from rekindle.errors import ContextTooLong, ServerError
from rekindle.http.body import run_off_loop_if_large
from rekindle.protocol.admin import Tokenize, Tokenized
from rekindle.worker.client import RuntimeClient


async def fitted(
    request: Request,
    runtime: RuntimeClient,
    body: PromptFields,
    conversation: Conversation,
    config: Config,
) -> Conversation:
    """Cut the conversation so that it fits into the model's context.

    If not even the last user message fits, the runtime refuses the turn.
    """
    if body.truncation != "auto":
        return conversation
    limit = runtime.loaded.context_tokens
    reserved = min(body.reply_tokens or 1, limit // 2)
    size_bytes = len(await request.body()) + conversation.size_bytes

    def question(begin: int) -> Tokenize:
        messages = conversation.cut(begin).messages
        chat = RenderedChat(rendered(list(map(_without_media, messages))), [])
        return count_request(body, conversation, chat, config)

    async def fits(begin: int) -> bool:
        op = await run_off_loop_if_large(request, size_bytes, question, begin)
        try:
            found = await AdminClient.of_tenant(request).request(runtime, op, Tokenized)
        except ServerError as error:
            if error.code != ContextTooLong.code:
                raise
            return False
        return found.count + reserved <= limit

    if await fits(0):
        return conversation
    cuts = await run_off_loop_if_large(
        request, size_bytes, _cuts, conversation.items, step=max(limit // 2, 1)
    )
    if not cuts:
        return conversation
    begin = await _first(cuts, fits)
    return await run_off_loop_if_large(request, size_bytes, conversation.cut, begin)


async def _first(cuts: Sequence[int], fits: Callable[[int], Awaitable[bool]]) -> int:
    """Find the first cut after which the conversation fits, or the last cut, by bisection."""
    least, most = 0, len(cuts) - 1
    while least < most:
        middle = (least + most) // 2
        if await fits(cuts[middle]):
            most = middle
        else:
            least = middle + 1
    return cuts[least]


def _cuts(items: Sequence[Any], *, step: int) -> list[int]:
    """Items at which the conversation may begin: user messages at least `step` characters apart."""
    cuts, characters, reached = list[int](), 0, 0
    last = None
    for place, item in enumerate(items):
        if isinstance(item, MessageItem) and item.role == "user" and place:
            last = place
            if characters - reached >= step:
                reached, last = characters, None
                cuts.append(place)
        characters += _characters(item)
    return cuts if last is None else [*cuts, last]  # the last message is always a cut


def _characters(item: Any) -> int:
    match item:
        case MessageItem(content=content) | CallOutput(output=content):
            if isinstance(content, str):
                return len(content)
            return sum(len(part.text) for part in content if isinstance(part, TextPart))
        case (
            FunctionCall(arguments=text)
            | CustomToolCall(input=text)
            | CompactionItem(encrypted_content=text)
        ):
            return len(text)
    return 0


def _without_media(message: Message) -> Message:
    """Media are loaded after the conversation is cut."""
    if not message.media:
        return message
    content = message.content if isinstance(message.content, list) else []
    kept = [part for part in content if part.type == "text"]
    return message.model_copy(update={"content": kept})
