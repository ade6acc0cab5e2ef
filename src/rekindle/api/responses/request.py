"""From a request of the Responses API to the turn that a runtime computes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from rekindle.api.base.fields import TextAllowance
from rekindle.api.base.images import Illustrated
from rekindle.api.base.messages import CalledFunction, Message, ToolCall, rendered
from rekindle.api.base.signature import signed_text
from rekindle.api.responses.items import (
    MOST_ITEMS,
    CallOutput,
    CustomToolCall,
    FunctionCall,
    ItemReference,
    MessageItem,
    ReasoningItem,
    UnservedItem,
    for_template,
    identified,
    is_marked,
    text_of,
)
from rekindle.api.responses.response import LIFETIMES_S
from rekindle.api.responses.schema import (
    PromptFields,
    ResponsesRequest,
    forces_call,
    shown_tools,
    tool_use,
)
from rekindle.api.responses.stored import Lines, as_lines, parsed, size_bytes
from rekindle.api.responses.tools import INPUT, Toolbox
from rekindle.config import Config
from rekindle.errors import BadRequest
from rekindle.protocol.admin import Tokenize
from rekindle.protocol.requests import GenerateRequest, Names, Prepare, SamplingParams

# ----------------------------------------------------------------------
# A conversation in items as the messages that the runtime renders.
#
# A reply is several items here, and one message there: its reasoning, its text and its calls. So
# the same conversation has the same prompt in every dialect.


def messages_of(instructions: str | None, items: Sequence[Any], toolbox: Toolbox) -> list[Message]:
    """The instructions first, then all items in the places they were sent in."""
    first = [_message("system", content=instructions)] if instructions else []
    return [*first, *_Rendering(toolbox).messages(items)]


class _Reply:
    """A message of the assistant, as its items come."""

    def __init__(self) -> None:
        self.reasoning: list[str] = []
        self.texts: list[str] = []
        self.calls: list[ToolCall] = []

    def message(self) -> Message:
        text = "".join(self.texts)
        fields: dict[str, Any] = {"content": text or (None if self.calls else "")}
        if reasoning := "".join(self.reasoning):
            fields["reasoning_content"] = reasoning
        if self.calls:
            fields["tool_calls"] = self.calls
        return _message("assistant", **fields)


class _Rendering:
    """Of one request's items."""

    def __init__(self, toolbox: Toolbox) -> None:
        self._toolbox = toolbox
        self._allowance = TextAllowance(param="input")
        self._reply: _Reply | None = None

    def messages(self, items: Sequence[Any]) -> Iterator[Message]:
        for item in items:
            yield from self._ended_before(item)
            match item:
                case ReasoningItem():
                    self._open().reasoning.append(self._reasoning(item))
                case MessageItem(role="assistant"):
                    self._open().texts.append(text_of(item.content))
                case FunctionCall():
                    self._open().calls.append(self._call(item, item.arguments))
                case CustomToolCall():
                    arguments = json.dumps({INPUT: item.input}, ensure_ascii=False)
                    self._open().calls.append(self._call(item, arguments))
                case MessageItem():
                    yield _message(item.role, content=for_template(item.content))
                case CallOutput():
                    content = for_template(item.output)
                    yield _message("tool", content=content, tool_call_id=item.call_id)
        yield from self._closed()

    def _open(self) -> _Reply:
        self._reply = self._reply or _Reply()
        return self._reply

    def _closed(self) -> Iterator[Message]:
        if self._reply is not None:
            yield self._reply.message()
            self._reply = None

    def _ended_before(self, item: Any) -> Iterator[Message]:
        """The reply that is open, unless this is one more item of it."""
        reply = self._reply
        match item:
            case ReasoningItem():
                is_over = reply is not None and bool(reply.texts or reply.calls)
            case MessageItem(role="assistant"):
                is_over = reply is not None and bool(reply.texts) and not reply.calls
            case FunctionCall() | CustomToolCall():
                is_over = False
            case MessageItem() | CallOutput():
                is_over = True
            case _:  # what is left out ends nothing
                is_over = False
        return self._closed() if is_over else iter(())

    def _reasoning(self, item: ReasoningItem) -> str:
        """What a model here wrote: what other providers packed cannot be read."""
        if item.content:
            return self._allowance.take(text_of(item.content))
        if not item.encrypted_content:
            return ""
        return signed_text("", item.encrypted_content, self._allowance) or ""

    def _call(self, item: FunctionCall | CustomToolCall, arguments: str) -> ToolCall:
        name = self._toolbox.resolve(item.name, item.namespace)
        function = CalledFunction.model_construct(name=name, arguments=arguments or "{}")
        return ToolCall.model_construct(id=item.call_id, type="function", function=function)


def _message(role: str, **fields: Any) -> Message:
    return Message.model_construct(role=role, **fields)


DAY_S = 86_400.0
KEPT_S = 30 * DAY_S  # a stored response that nobody asks for
#: Degrees of effort that templates do not know, by the nearest that they do.
EFFORTS = {"minimal": "low", "xhigh": "high", "max": "high"}


@dataclass(frozen=True, slots=True)
class Conversation:
    """All that came before, and what the request adds to it."""

    instructions: str | None
    items: list[Any]  # all of it
    messages: list[Message]
    toolbox: Toolbox
    lines: Lines  # items of all of it, as they are stored
    own_lines: Lines  # of those, what the request adds
    ignored_items: list[str]  # types of what was left out
    is_marked: bool  # whether the request has a breakpoint

    @classmethod
    def of(
        cls, body: PromptFields, history: Lines = (), references: Mapping[str, Any] | None = None
    ) -> Conversation:
        """`references`: items that references of the request stand for, by their ids."""
        toolbox, sent = Toolbox.of(body.tools), _sent(body, is_first=not history)
        own = [_resolved(item, references or {}) for item in sent]
        ignored = [item.type for item in own if isinstance(item, UnservedItem)]
        own = [item for item in own if not isinstance(item, UnservedItem)]
        if len(history) + len(own) > MOST_ITEMS:
            raise BadRequest(
                f"The conversation has more than {MOST_ITEMS} items: begin another one.",
                param="input",
            )
        before = parsed(history)
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
            is_marked=_marked(own),
        )

    @property
    def size_bytes(self) -> int:
        """Of its items."""
        return size_bytes(self.lines)

    def cut(self, begin: int) -> Conversation:
        """The same from this item on, behind the instructions that it begins with."""
        if not begin:
            return self
        leading = takewhile(_instructs, self.items[:begin])
        kept = [*leading, *self.items[begin:]]
        return self.with_messages(messages_of(self.instructions, kept, self.toolbox))

    def with_messages(self, messages: list[Message]) -> Conversation:
        return replace(self, messages=messages)

    def shown(self, body: PromptFields, illustrated: Illustrated | None) -> dict[str, Any]:
        """The fields of a request to the runtime; `illustrated`: with its pictures."""
        return {
            "messages": illustrated.messages if illustrated else rendered(self.messages),
            "pictures": illustrated.pictures if illustrated else [],
            "tools": shown_tools(body.tool_choice, self.toolbox) or None,
        }


def _instructs(item: Any) -> bool:
    return isinstance(item, MessageItem) and item.role in ("system", "developer")


def _sent(body: PromptFields, *, is_first: bool) -> list[Any]:
    """The request's own items; an empty input is a message, where there is nothing else."""
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
            f"No item {item.id[:128]!r} is stored here: send the item itself instead of a "
            "reference to it.",
            param="input",
        )
    return found


def _marked(items: Sequence[Any]) -> bool:
    contents = (
        item.content if isinstance(item, MessageItem) else item.output
        for item in items
        if isinstance(item, MessageItem | CallOutput)
    )
    return any(map(is_marked, contents))


def generate_request(
    body: ResponsesRequest,
    conversation: Conversation,
    illustrated: Illustrated | None,
    config: Config,
    salt: bytes,
    names: Names,
) -> GenerateRequest:
    structure, toolbox = body.structure, conversation.toolbox
    if structure and forces_call(body.tool_choice, toolbox):
        raise BadRequest(
            f"`{structure.param}` says what the text has to be, and `tool_choice` asks for a call "
            "and no text: leave one of them out.",
            param="text",
        )
    reuse = config.context_cache and _uses_cache(body, conversation)
    return GenerateRequest(
        turn=0,
        **conversation.shown(body, illustrated),
        template_kwargs=_template_kwargs(body),
        normalise=_or(body.normalise, config.normalise),
        tool_use=tool_use(
            body.tool_choice, toolbox, parallel=body.parallel_tool_calls is not False
        ),
        structured_output=structure,
        prepare=Prepare(ttl_s=names.ttl_s) if body.prewarms else None,
        sampling=_sampling(body, config),
        max_tokens=_or(body.max_output_tokens, config.max_tokens),
        reuse=reuse,
        names=names if reuse else None,
        exact=_or(body.cache_exact, config.exact),
        kv_bits=config.kv_bits,
        kv_quantization_start=config.kv_quantization_start,
        salt=salt,
        progress=bool(body.stream),
    )


def token_question(
    body: PromptFields, conversation: Conversation, illustrated: Illustrated | None, config: Config
) -> Tokenize:
    """How many tokens the prompt of such a turn has."""
    return Tokenize(
        **conversation.shown(body, illustrated),
        template_kwargs=_template_kwargs(body),
        normalise=_or(body.normalise, config.normalise),
        with_tokens=False,
    )


def names_of(body: ResponsesRequest, key: str) -> Names:
    """What the turn goes on from, and what its own state is called: `key`, if it is stored."""
    options = body.prompt_cache_options
    compared = options.comparison_response_id if options else None
    lifetime = options.ttl if options else None
    day_s = DAY_S if body.prompt_cache_retention == "24h" else None
    pin_s = LIFETIMES_S[lifetime] if lifetime else None
    prewarmed_s = pin_s or LIFETIMES_S["30m"]
    return Names(
        cache_key=compared or body.previous_response_id,
        entry_key=key if body.is_stored else None,
        session_id=body.session_id or body.conversation_id,
        prompt_cache_key=body.prompt_cache_key,
        ttl_s=KEPT_S if body.is_stored else prewarmed_s if body.prewarms else day_s,
        in_memory=body.prompt_cache_retention in ("in_memory", "in-memory"),
        pin_s=pin_s,
    )


def _uses_cache(body: ResponsesRequest, conversation: Conversation) -> bool:
    """`explicit` is documented so: without a breakpoint, nothing is reused and nothing kept."""
    options = body.prompt_cache_options
    is_explicit = options is not None and options.mode == "explicit"
    return body.use_kv_cache is not False and (conversation.is_marked or not is_explicit)


def _template_kwargs(body: PromptFields) -> dict[str, Any]:
    """Nothing is said where a client says nothing: then the prompt is that of other dialects."""
    effort = body.reasoning.effort if body.reasoning else None
    if effort is None:
        return {}
    if effort == "none":
        return {"enable_thinking": False}
    return {"reasoning_effort": EFFORTS.get(effort, effort)}


def _sampling(body: ResponsesRequest, config: Config) -> SamplingParams:
    return SamplingParams(
        temperature=_or(body.temperature, config.temperature),
        top_p=_or(body.top_p, config.top_p),
        repetition_penalty=config.repetition_penalty,
        repetition_context_size=config.repetition_context_size,
        seed=body.seed,
        top_logprobs=body.logprobs,
    )


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
