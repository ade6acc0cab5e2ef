"""A conversation in items as the messages that the runtime renders.

A reply is several items here, and one message there: its reasoning, its text and its calls. So the
same conversation has the same prompt in every dialect.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from rekindle.api.allowance import TextAllowance
from rekindle.api.message import CalledFunction, Message, ToolCall
from rekindle.api.responses.content import for_template, text_of
from rekindle.api.responses.items import (
    CallOutput,
    CustomToolCall,
    FunctionCall,
    MessageItem,
    ReasoningItem,
)
from rekindle.api.responses.tools import INPUT, Toolbox
from rekindle.api.signature import signed_text


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
