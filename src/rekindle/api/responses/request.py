"""Builds the turn of a Responses request out of its items and those before it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from rekindle.api.base.custom_tools import custom_arguments
from rekindle.api.base.documents import STORED_S, Lines, as_lines, size_bytes
from rekindle.api.base.fields import MAX_ITEMS, TextBudget
from rekindle.api.base.messages import Message, ToolCall, plain_message, reply_message, tool_call
from rekindle.api.base.reply import is_complete
from rekindle.api.base.request import EFFORTS, RenderedChat, RequestBuilder, or_default, retention
from rekindle.api.base.signature import signed_text
from rekindle.api.responses.items import (
    CallOutput,
    CompactionItem,
    CustomToolCall,
    FunctionCall,
    ItemReference,
    MessageItem,
    ReasoningItem,
    UnservedItem,
    for_template,
    identified,
    text_of,
)
from rekindle.api.responses.response import LIFETIMES_S
from rekindle.api.responses.schema import PromptFields, ResponsesRequest, select_tools
from rekindle.api.responses.stored import parsed
from rekindle.api.responses.tools import Toolbox
from rekindle.config import Config
from rekindle.errors import BadRequest
from rekindle.protocol.admin import Tokenize
from rekindle.protocol.requests import GenerateRequest, Names, Prepare

SUMMARY = "Summary of the conversation so far:"


def messages_of(instructions: str | None, items: Sequence[Any], toolbox: Toolbox) -> list[Message]:
    """Render the instructions, then the items in their order.

    The reasoning, text and calls of a reply are separate items. They become one message, so that
    the same conversation has the same prompt in every dialect.
    """
    first = [plain_message("system", content=instructions)] if instructions else []
    return [*first, *_Rendering(toolbox).messages(items)]


class _Reply:
    """Collects the items of one assistant message."""

    def __init__(self) -> None:
        self.reasoning: list[str] = []
        self.texts: list[str] = []
        self.calls: list[ToolCall] = []

    def messages(self) -> list[Message]:
        """The message of the collected items, or none if there are no items."""
        if not (self.reasoning or self.texts or self.calls):
            return []
        return [reply_message("".join(self.texts), "".join(self.reasoning), self.calls)]

    def ends_before(self, item: Any) -> bool:
        match item:
            case ReasoningItem():
                return bool(self.texts or self.calls)
            case MessageItem(role="assistant"):
                return bool(self.texts) and not self.calls
        # Calls and ignored items continue the reply.
        return isinstance(item, MessageItem | CallOutput | CompactionItem)


class _Rendering:
    def __init__(self, toolbox: Toolbox) -> None:
        self._toolbox = toolbox
        self._budget = TextBudget(param="input")

    def messages(self, items: Sequence[Any]) -> Iterator[Message]:
        reply = _Reply()
        for item in items:
            if reply.ends_before(item):
                yield from reply.messages()
                reply = _Reply()
            match item:
                case ReasoningItem():
                    reply.reasoning.append(self._reasoning(item))
                case MessageItem(role="assistant"):
                    reply.texts.append(text_of(item.content))
                case FunctionCall():
                    reply.calls += self._function_call(item)
                case CustomToolCall():
                    arguments = custom_arguments(item.input)
                    reply.calls.append(self._call(item, arguments))
                case MessageItem():
                    yield plain_message(item.role, content=for_template(item.content))
                case CompactionItem():
                    yield plain_message("user", content=self._summary(item))
                case CallOutput():
                    content = for_template(item.output)
                    yield plain_message("tool", content=content, tool_call_id=item.call_id)
        yield from reply.messages()

    def _reasoning(self, item: ReasoningItem) -> str:
        """Reasoning that a model here wrote. What other providers packed cannot be read."""
        if item.content:
            return self._budget.take(text_of(item.content))
        return signed_text("", item.encrypted_content or "", self._budget) or ""

    def _summary(self, item: CompactionItem) -> str:
        """The summary that a model of this server wrote. Without it, the conversation could not
        continue."""
        summary = signed_text("", item.encrypted_content, self._budget)
        if summary is None:
            raise BadRequest(
                "A `compaction` item was not made by this server: send the messages that it stands "
                "for.",
                param="input",
            )
        return f"{SUMMARY}\n\n{summary}"

    def _function_call(self, item: FunctionCall) -> list[ToolCall]:
        """The call, unless the reply was cut off in it."""
        if item.status == "incomplete" and not is_complete(item.arguments):
            return []
        return [self._call(item, item.arguments)]

    def _call(self, item: FunctionCall | CustomToolCall, arguments: str) -> ToolCall:
        name = self._toolbox.resolve(item.name, item.namespace)
        return tool_call(item.call_id, name, arguments or "{}")


@dataclass(frozen=True, slots=True)
class Conversation:
    """The items before the request, and those that it adds."""

    instructions: str | None
    items: list[Any]  # all of them
    messages: list[Message]
    toolbox: Toolbox
    lines: Lines  # all items, as they are stored
    own_lines: Lines  # the items that the request adds
    ignored_items: list[str]  # types of items that are left out
    is_marked: bool  # whether the request has a cache breakpoint

    @classmethod
    def of(
        cls, body: PromptFields, history: Lines = (), references: Mapping[str, Any] | None = None
    ) -> Conversation:
        """`references` are the stored items that the request refers to, by id."""
        toolbox, sent = Toolbox(body.tools), _sent(body, is_first=not history)
        own = [_resolved(item, references or {}) for item in sent]
        ignored = [item.type for item in own if isinstance(item, UnservedItem)]
        own = [item for item in own if not isinstance(item, UnservedItem)]
        if len(history) + len(own) > MAX_ITEMS:
            raise BadRequest(
                f"The conversation has more than {MAX_ITEMS} items: begin another one.",
                param="input",
            )
        before = parsed(history)
        if history:
            _check_outputs(before, own)
        own_lines = as_lines(identified(own, taken=(item.id for item in before)))
        items = [*before, *own]
        return cls(
            instructions=body.instructions,
            items=items,
            messages=messages_of(body.instructions, items, toolbox),
            toolbox=toolbox,
            lines=(*history, *own_lines),
            own_lines=own_lines,
            ignored_items=ignored,
            is_marked=any(map(_is_marked, own)),
        )

    @property
    def size_bytes(self) -> int:
        return size_bytes(self.lines)

    def cut(self, begin: int) -> Conversation:
        """Drop the items before `begin`, except for instructions at the very beginning."""
        if not begin:
            return self
        leading = takewhile(_instructs, self.items[:begin])
        kept = [*leading, *self.items[begin:]]
        return replace(self, messages=messages_of(self.instructions, kept, self.toolbox))


def _check_outputs(before: Sequence[Any], own: Sequence[Any]) -> None:
    """Refuse an output without a call. Call this only for conversations that are stored here.
    Clients that send the conversation may have left out the calls of tools that run on a server."""
    calls = (item for item in (*before, *own) if isinstance(item, FunctionCall | CustomToolCall))
    known = {call.call_id for call in calls}
    for item in own:
        if isinstance(item, CallOutput) and item.call_id not in known:
            raise BadRequest(
                f"The conversation has no call {item.call_id[:128]!r} for this output: send the "
                "`call_id` of a call in it.",
                param="input",
            )


def _instructs(item: Any) -> bool:
    return isinstance(item, MessageItem) and item.role in ("system", "developer")


def _sent(body: PromptFields, *, is_first: bool) -> list[Any]:
    """The request's own items. An empty input is a message if there is no other item."""
    if isinstance(body.input, list):
        return body.input
    if not body.input and not is_first:
        return []
    return [MessageItem.model_construct(type="message", role="user", content=body.input or "")]


def _resolved(item: Any, references: Mapping[str, Any]) -> Any:
    if not isinstance(item, ItemReference):
        return item
    found = references.get(item.id)
    if found is None:
        raise BadRequest(
            f"No item {item.id[:128]!r} is stored here: send the item itself.", param="input"
        )
    return found


def _is_marked(item: Any) -> bool:
    match item:
        case MessageItem(content=list(parts)) | CallOutput(output=list(parts)):
            return any(part.prompt_cache_breakpoint for part in parts)
    return False


def generate_request(
    body: ResponsesRequest,
    conversation: Conversation,
    chat: RenderedChat,
    builder: RequestBuilder,
    names: Names,
) -> GenerateRequest:
    config = builder.config
    selection = select_tools(body.tool_choice, conversation.toolbox)
    selection.check_format(body.structure, "text")
    return builder.build(
        **prompt_fields(body, conversation, chat, config),
        tool_use=selection.tool_use(
            parallel=body.parallel_tool_calls, max_calls=body.max_tool_calls
        ),
        structured_output=body.structure,
        prepare=Prepare(ttl_s=names.ttl_s) if body.prewarms else None,
        sampling=body.sampling_params(config, body.logprobs),
        max_tokens=or_default(body.max_output_tokens, config.max_tokens),
        use_cache=_uses_cache(body, conversation),
        names=names,
        exact=body.cache_exact,
        progress=bool(body.stream),
    )


def count_request(
    body: PromptFields, conversation: Conversation, chat: RenderedChat, config: Config
) -> Tokenize:
    """Ask how many tokens the prompt has."""
    return Tokenize(**prompt_fields(body, conversation, chat, config), with_tokens=False)


def prompt_fields(
    body: PromptFields, conversation: Conversation, chat: RenderedChat, config: Config
) -> dict[str, Any]:
    selection = select_tools(body.tool_choice, conversation.toolbox)
    return {
        **chat.fields,
        "tools": conversation.toolbox.described(selection) or None,
        "template_kwargs": _template_kwargs(body),
        "normalise": or_default(body.normalise, config.normalise),
    }


def names_of(body: ResponsesRequest, key: str, previous: str | None) -> Names:
    """The names of the state to continue from, and `key` for the state of a stored response.

    `previous` is the key of the previous response, if that was stored.
    """
    options = body.prompt_cache_options
    kept = retention(body.prompt_cache_retention)
    pin_s = LIFETIMES_S[options.ttl] if options and options.ttl else None
    if body.is_stored:
        kept["ttl_s"] = STORED_S
    elif body.prewarms:
        kept["ttl_s"] = pin_s or LIFETIMES_S["30m"]
    return Names(
        **kept,
        cache_key=(options and options.comparison_response_id) or previous,
        entry_key=key if body.is_stored else None,
        session_id=body.session_id or body.conversation_id,
        prompt_cache_key=body.prompt_cache_key,
        pin_s=pin_s,
    )


def _uses_cache(body: ResponsesRequest, conversation: Conversation) -> bool:
    """As OpenAI documents it, `explicit` without a breakpoint reuses and keeps nothing."""
    options = body.prompt_cache_options
    is_explicit = options is not None and options.mode == "explicit"
    return body.use_kv_cache is not False and (conversation.is_marked or not is_explicit)


def _template_kwargs(body: PromptFields) -> dict[str, Any]:
    """Set only what the client sets, so that the prompt equals that of other dialects."""
    effort = body.reasoning.effort if body.reasoning else None
    if effort is None:
        return {}
    if effort == "none":
        return {"enable_thinking": False}
    return {"reasoning_effort": EFFORTS.get(effort, effort)}
