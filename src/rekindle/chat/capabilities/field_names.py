"""OpenAI's name of a role and of a field, in the words a template knows."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rekindle.chat.content import Message

DEVELOPER = "developer"
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")  # what templates call it


@dataclass(frozen=True, slots=True)
class FieldNames:
    """What a template's source says about the names it reads."""

    developer_role: bool
    reasoning: str | None  # the field it reads a reply's reasoning from

    @classmethod
    def of(cls, source: str) -> FieldNames:
        read = (name for name in REASONING_FIELDS if re.search(rf"""[.'"]{name}\b""", source))
        return cls(developer_role=DEVELOPER in source, reasoning=next(read, None))

    def adapt(self, message: Message) -> Message:
        if message.get("role") == DEVELOPER and not self.developer_role:
            return {**message, "role": "system"}
        reasoning = next((message[name] for name in REASONING_FIELDS if message.get(name)), None)
        if reasoning is None or self.reasoning is None or self.reasoning in message:
            return message
        if message.get("tool_calls") and message.get("content"):
            return message  # gpt-oss's template refuses both at once
        return {**message, self.reasoning: reasoning}
