"""A reply, accumulated from its parts."""

from __future__ import annotations

import secrets
import string
from dataclasses import dataclass, field
from typing import Any

from rekindle.protocol.events import (
    ArgumentsDelta,
    Part,
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
    ToolCallStart,
)

_ID_CHARACTERS = string.ascii_letters + string.digits
_ID_LENGTH = 9  # Mistral's templates refuse any other length


def new_call_id() -> str:
    return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(_ID_LENGTH))


@dataclass(slots=True)
class ToolCall:
    """A function that the model calls, with its arguments as far as they have come."""

    id: str
    name: str
    pieces: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> str:
        return "".join(self.pieces)

    def as_dict(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


class AssistantMessage:
    """Accumulates the parts of one reply: in the runtime to store it, in the front to answer."""

    def __init__(self, *, keeps_logprobs: bool = True) -> None:
        self._keeps_logprobs = keeps_logprobs
        self.tool_calls: list[ToolCall] = []
        self.logprobs: list[TokenLogprob] = []
        self._text: list[str] = []
        self._reasoning: list[str] = []

    def add(self, part: Part) -> None:
        match part:
            case TextDelta(text, logprobs):
                self._text.append(text)
                if self._keeps_logprobs:
                    self.logprobs += logprobs or []
            case ReasoningDelta(text):
                self._reasoning.append(text)
            case ToolCallStart(_, name, id):
                self.tool_calls.append(ToolCall(id, name))
            case ArgumentsDelta(index, text):
                self.tool_calls[index].pieces.append(text)

    @property
    def text(self) -> str:
        return "".join(self._text)

    @property
    def reasoning(self) -> str | None:
        """None when the model wrote none."""
        return "".join(self._reasoning) if self._reasoning else None

    def as_dict(self) -> dict[str, Any]:
        """The message in OpenAI's form; a message of calls alone has no content."""
        content = self.text or (None if self.tool_calls else "")
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [call.as_dict() for call in self.tool_calls]
        return message
