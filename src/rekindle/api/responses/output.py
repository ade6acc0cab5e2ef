"""Converts the parts of a reply to the items and stream events of a response."""

from __future__ import annotations

from typing import Any

from rekindle.api.base.custom_tools import CustomInput
from rekindle.api.base.reply import is_complete, token_logprobs
from rekindle.api.base.signature import seal
from rekindle.api.responses.items import PREFIXES
from rekindle.api.responses.tools import Toolbox
from rekindle.protocol.events import (
    ArgumentsDelta,
    Part,
    ReasoningDelta,
    TextDelta,
    ToolCallStart,
)

Event = dict[str, Any]
#: The first words of the events about an item's text, by the item's type.
EVENTS = {
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
    "custom_tool_call": "response.custom_tool_call_input",
}


class ReplyItems:
    """Converts the parts of a reply to stream events, and collects the items of the response.

    One item is open at a time. Its index is its position among the items.
    """

    def __init__(self, number: str, toolbox: Toolbox, *, seals_reasoning: bool) -> None:
        """`number` is the response's. It is part of the item ids, so that items can be found."""
        self._number = number
        self._toolbox = toolbox
        self._seals_reasoning = seals_reasoning
        self.items: list[dict[str, Any]] = []  # complete after `close`
        self._pieces: list[str] = []  # of the open item
        self._logprobs: list[dict[str, Any]] = []
        self._custom = CustomInput()
        self._is_open = False
        self._place: dict[str, Any] = {}  # fields that locate the open item in its events

    @property
    def so_far(self) -> list[dict[str, Any]]:
        return self.items[:-1] if self._is_open else self.items

    def add(self, part: Part) -> list[Event]:
        match part:
            case TextDelta(text, logprobs):
                if not text and not logprobs:
                    return []
                opened = self._opened({"type": "message", "role": "assistant"})
                shown = token_logprobs(logprobs) if logprobs else []
                self._logprobs += shown
                return [*opened, self._delta(text, logprobs=shown)]
            case ReasoningDelta(text):
                return [*self._opened({"type": "reasoning", "summary": []}), self._delta(text)]
            case ToolCallStart(_, name, id):
                return [*self.close(), self._open(self._call(name, id))]
            case ArgumentsDelta(_, text):
                if self.items[-1]["type"] == "function_call":
                    return [self._delta(text)]
                return self._input_delta(self._custom.add(text))

    def close(self, status: str = "completed", *, is_cut: bool = False) -> list[Event]:
        """End the open item, if there is one.

        `is_cut` means that a call may lack some of its arguments. It is then incomplete, and keeps
        those that there are.
        """
        if not self._is_open:
            return []
        self._is_open = False
        item, events = self.items[-1], list[Event]()
        match item["type"]:
            case "message" | "reasoning":
                events = self._close_content(item)
            case "function_call":
                arguments = "".join(self._pieces)
                if is_cut and not is_complete(arguments):
                    status = "incomplete"
                item["arguments"] = arguments or ("{}" if status == "completed" else "")
                done = {"arguments": item["arguments"], "name": item["name"]}
                events = [self._event("done", **done)]
            case "custom_tool_call":
                events = self._input_delta(self._custom.end())
                item["input"] = "".join(self._pieces)
                events.append(self._event("done", input=item["input"]))
        item["status"] = status
        return [*events, self._item_event("response.output_item.done")]

    # -- opening -------------------------------------------------------------------------------

    def _opened(self, item: dict[str, Any]) -> list[Event]:
        """Open an item for a part, unless one of this type is open."""
        if self._is_open and self.items[-1]["type"] == item["type"]:
            return []
        events = [*self.close(), self._open({**item, "content": []})]
        self._place["content_index"] = 0
        return [*events, self._part_event("response.content_part.added", self._part(""))]

    def _call(self, name: str, call_id: str) -> dict[str, Any]:
        tool = self._toolbox.offered.get(name)
        custom = tool is not None and tool.is_custom
        item = {"type": "custom_tool_call" if custom else "function_call", "call_id": call_id}
        item["name"] = tool.tool.name if tool else name
        if tool is not None and tool.namespace is not None:
            item["namespace"] = tool.namespace
        item["input" if custom else "arguments"] = ""
        return item

    def _open(self, item: dict[str, Any]) -> Event:
        item_id = f"{PREFIXES[item['type']]}_{self._number}{len(self.items):04x}"
        self._place = {"item_id": item_id, "output_index": len(self.items)}
        self.items.append({"id": item_id, **item, "status": "in_progress"})
        self._pieces, self._logprobs, self._custom = [], [], CustomInput()
        self._is_open = True
        return self._item_event("response.output_item.added")

    # -- content -------------------------------------------------------------------------------

    def _delta(self, text: str, **fields: Any) -> Event:
        self._pieces.append(text)
        return self._event("delta", delta=text, **fields)

    def _input_delta(self, text: str) -> list[Event]:
        return [self._delta(text)] if text else []

    def _part(self, text: str) -> dict[str, Any]:
        """The content of the open item, which has a single part."""
        if self.items[-1]["type"] == "reasoning":
            return {"type": "reasoning_text", "text": text}
        logprobs = list(self._logprobs)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _close_content(self, item: dict[str, Any]) -> list[Event]:
        text = "".join(self._pieces)
        part = self._part(text)
        item["content"] = [part]
        done: dict[str, Any] = {"text": text}
        if item["type"] == "message":
            done["logprobs"] = self._logprobs
        elif self._seals_reasoning:
            item["encrypted_content"] = seal(text)
        ended = self._part_event("response.content_part.done", part)
        return [self._event("done", **done), ended]

    # -- events --------------------------------------------------------------------------------

    def _item_event(self, kind: str) -> Event:
        item = dict(self.items[-1])
        return {"type": kind, "output_index": len(self.items) - 1, "item": item}

    def _part_event(self, kind: str, part: dict[str, Any]) -> Event:
        return {"type": kind, **self._place, "part": part}

    def _event(self, kind: str, **fields: Any) -> Event:
        """An event about the text of the open item: a delta, or its end."""
        name = f"{EVENTS[self.items[-1]['type']]}.{kind}"
        return {"type": name, **self._place, **fields}
