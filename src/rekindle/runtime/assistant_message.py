"""A reply as its client has it."""

from __future__ import annotations

import secrets
import string
from typing import Any

from rekindle.chat.reply import Argued, Called, Part, Said, Thought

CALL_ID = string.ascii_letters + string.digits
CALL_ID_CHARACTERS = 9  # Mistral's templates refuse any other length; no other minds


class Call:
    """A function call as the client was given it."""

    def __init__(self, name: str) -> None:
        self.id = "".join(secrets.choice(CALL_ID) for _ in range(CALL_ID_CHARACTERS))
        self.name = name
        self.arguments: list[str] = []

    @property
    def message(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": "".join(self.arguments)}
        return {"id": self.id, "type": "function", "function": function}


class Delivered:
    """What a client was given of a reply, part by part. One that takes one call at a time is given
    nothing of what follows it."""

    def __init__(self, *, parallel: bool = True) -> None:
        self.raw: list[str] = []
        self.calls: list[Call] = []
        self.is_enough = False  # the one call was made, and the reply goes on
        self._parallel = parallel
        self._said: list[str] = []
        self._thought: list[str] = []

    def add(self, part: Part) -> bool:
        """Whether it is part of what the client is given."""
        self.is_enough |= self._is_beyond(part)
        if self.is_enough:
            return False
        match part:
            case Said(text):
                self._said.append(text)
            case Thought(text):
                self._thought.append(text)
            case Called(_, name):
                self.calls.append(Call(name))
            case Argued(call, text):
                self.calls[call].arguments.append(text)
        return True

    def _is_beyond(self, part: Part) -> bool:
        if self._parallel or not self.calls:
            return False
        return not isinstance(part, Argued)

    @property
    def content(self) -> str:
        return "".join(self._said)

    @property
    def message(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self._thought:
            message["reasoning_content"] = "".join(self._thought)
        if self.calls:
            message["content"] = self.content or None
            message["tool_calls"] = [call.message for call in self.calls]
        return message
