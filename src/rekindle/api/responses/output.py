"""Converts the parts of a reply to the items and stream events of a response."""

from __future__ import annotations

from typing import Any

from rekindle.api.base.reply import token_logprobs
from rekindle.api.base.signature import seal
from rekindle.api.responses.items import PREFIXES
from rekindle.api.responses.tools import CustomInput, Toolbox
from rekindle.protocol.events import (
    ArgumentsDelta,
    Part,
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
    ToolCallStart,
)

Event = dict[str, Any]


class ReplyItems:
    """Converts the parts of a reply to stream events, and collects the items of the response.

    One item is open at a time. Its index is its position among the items.
    """

    def __init__(self, number: str, toolbox: Toolbox, *, seals_reasoning: bool) -> None:
        """`number` is the response's. It is part of the item ids, so that items can be found."""
        self._number = number
        self._toolbox = toolbox
        self._seals_reasoning = seals_reasoning
        self._items: list[dict[str, Any]] = []
        self._pieces: list[str] = []  # of the open item
        self._logprobs: list[dict[str, Any]] = []
        self._custom = CustomInput()
        self._is_open = False
        self._place: dict[str, Any] = {}  # fields that locate the open item in its events

    @property
    def items(self) -> list[dict[str, Any]]:
        """All items. The last one must be closed."""
        assert not self._is_open
        return self._items

    @property
    def so_far(self) -> list[dict[str, Any]]:
        return self._items[:-1] if self._is_open else self._items

    def add(self, part: Part) -> list[Event]:
        match part:
            case TextDelta(text, logprobs):
                if not text and not logprobs:
                    return []
                return [*self._opened("message"), self._text_delta(text, logprobs)]
            case ReasoningDelta(text):
                return [*self._opened("reasoning"), self._reasoning_delta(text)]
            case ToolCallStart(_, name, id):
                return [*self.close(), *self._open(self._call(name, id))]
            case ArgumentsDelta(_, text):
                return self._arguments_delta(text)

    def close(self, status: str = "completed") -> list[Event]:
        """End the open item, if there is one."""
        if not self._is_open:
            return []
        self._is_open = False
        item, events = self._items[-1], list[Event]()
        match item["type"]:
            case "message":
                events = self._close_text(item)
            case "reasoning":
                events = self._close_reasoning(item)
            case "function_call":
                item["arguments"] = "".join(self._pieces) or "{}"
                events = [
                    self._event(
                        "response.function_call_arguments.done",
                        arguments=item["arguments"],
                        name=item["name"],
                    )
                ]
            case "custom_tool_call":
                events = self._close_custom(item)
        item["status"] = status
        return [*events, self._item_event("response.output_item.done", item)]

    # -- opening -------------------------------------------------------------------------------

    def _opened(self, kind: str) -> list[Event]:
        """Open an item for a part, unless one of this type is open."""
        if self._is_open and self._items[-1]["type"] == kind:
            return []
        is_text = kind == "message"
        own: dict[str, Any] = {"role": "assistant"} if is_text else {"summary": []}
        events = [*self.close(), *self._open({"type": kind, **own, "content": []})]
        part = self._text_part("") if is_text else _reasoning_part("")
        return [*events, self._in_content("response.content_part.added", part=part)]

    def _call(self, name: str, call_id: str) -> dict[str, Any]:
        tool = self._toolbox.offered.get(name)
        custom = tool is not None and tool.is_custom
        item = {"type": "custom_tool_call" if custom else "function_call", "call_id": call_id}
        item["name"] = tool.tool.name if tool else name
        if tool is not None and tool.namespace is not None:
            item["namespace"] = tool.namespace
        item["input" if custom else "arguments"] = ""
        return item

    def _open(self, item: dict[str, Any]) -> list[Event]:
        item_id = f"{PREFIXES[item['type']]}_{self._number}{len(self._items):04x}"
        item = {"id": item_id, **item, "status": "in_progress"}
        self._place = {"item_id": item_id, "output_index": len(self._items)}
        self._items.append(item)
        self._pieces, self._logprobs, self._custom = [], [], CustomInput()
        self._is_open = True
        return [self._item_event("response.output_item.added", item)]

    # -- parts ---------------------------------------------------------------------------------

    def _text_delta(self, text: str, logprobs: list[TokenLogprob] | None) -> Event:
        shown = token_logprobs(logprobs) if logprobs else []
        self._logprobs += shown
        delta = self._in_content("response.output_text.delta", delta=text, logprobs=shown)
        return self._written(text, delta)

    def _reasoning_delta(self, text: str) -> Event:
        return self._written(text, self._in_content("response.reasoning_text.delta", delta=text))

    def _arguments_delta(self, text: str) -> list[Event]:
        if self._items[-1]["type"] == "function_call":
            kind = "response.function_call_arguments.delta"
            return [self._written(text, self._event(kind, delta=text))]
        return self._input_delta(self._custom.add(text))

    def _input_delta(self, text: str) -> list[Event]:
        kind = "response.custom_tool_call_input.delta"
        return [self._written(text, self._event(kind, delta=text))] if text else []

    def _written(self, text: str, event: Event) -> Event:
        self._pieces.append(text)
        return event

    # -- closing -------------------------------------------------------------------------------

    def _close_text(self, item: dict[str, Any]) -> list[Event]:
        text = "".join(self._pieces)
        part = self._text_part(text)
        item["content"] = [part]
        done = {"text": text, "logprobs": self._logprobs}
        return [
            self._in_content("response.output_text.done", **done),
            self._in_content("response.content_part.done", part=part),
        ]

    def _close_reasoning(self, item: dict[str, Any]) -> list[Event]:
        text = "".join(self._pieces)
        part = _reasoning_part(text)
        item["content"] = [part]
        if self._seals_reasoning:
            item["encrypted_content"] = seal(text)
        return [
            self._in_content("response.reasoning_text.done", text=text),
            self._in_content("response.content_part.done", part=part),
        ]

    def _close_custom(self, item: dict[str, Any]) -> list[Event]:
        events = self._input_delta(self._custom.end())
        item["input"] = "".join(self._pieces)
        return [*events, self._event("response.custom_tool_call_input.done", input=item["input"])]

    # -- events --------------------------------------------------------------------------------

    def _text_part(self, text: str) -> dict[str, Any]:
        return {
            "type": "output_text",
            "text": text,
            "annotations": [],
            "logprobs": list(self._logprobs),
        }

    def _item_event(self, kind: str, item: dict[str, Any]) -> Event:
        return {"type": kind, "output_index": len(self._items) - 1, "item": dict(item)}

    def _in_content(self, kind: str, **fields: Any) -> Event:
        return {"type": kind, **self._place, "content_index": 0, **fields}

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": kind, **self._place, **fields}


def _reasoning_part(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}
