"""The forms of message content, and which of them a template renders.

OpenAI lets content be a string, a list of parts or nothing; most templates were written for one
of the three. Trying them out is the only way to know: templates do not say.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rekindle.errors import TemplateFailed

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message]], str]

NEEDLE = "needle"
SHOWN = re.compile(f"(?<!['\"]){NEEDLE}(?!['\"])")  # in quotes it is a printed list, not its text
NOTHING = ("None", "null")  # as Python and as JSON prints it
TOOL_CALL = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": {}}}


@dataclass(frozen=True, slots=True)
class ContentForms:
    """What a template takes as content: a string, a list of parts, None in a reply."""

    text: bool
    parts: bool
    none: bool

    def fit(self, message: Message) -> Message:
        """The same message with its content in a form the template takes."""
        content = message.get("content")
        if content is None and message.get("role") == "assistant":
            return {**message, "content": None if self.none else ""}
        if isinstance(content, str) and self.parts and not self.text:
            return {**message, "content": [{"type": "text", "text": content}]}
        # Templates go through the parts of what people say; a result they print as it is.
        is_result = self.text and message.get("role") == "tool"
        if isinstance(content, list) and (is_result or not self.parts):
            return {**message, "content": joined(content)}
        return message


def probe(render: Render) -> ContentForms:
    """Which forms come through `render`."""

    def attempt(*messages: Message) -> str | None:
        try:
            return render(messages)
        except TemplateFailed:
            return None

    return ContentForms(
        text=shows(attempt(_user(NEEDLE))),
        parts=shows(attempt(_user([{"type": "text", "text": NEEDLE}]))),
        none=all(
            _same_silence(attempt(_user(NEEDLE), empty), attempt(_user(NEEDLE), none))
            for empty, none in (
                (_reply(""), _reply(None)),
                (_reply("", tool_calls=[TOOL_CALL]), _reply(None, tool_calls=[TOOL_CALL])),
            )
        ),
    )


def shows(rendered: str | None) -> bool:
    """Whether the needle came through as text."""
    return rendered is not None and SHOWN.search(rendered) is not None


def joined(content: Any) -> str:
    """Content of any form as one text."""
    if content is None:
        return ""
    return "\n".join(map(_text, content)) if isinstance(content, list) else str(content)


def _same_silence(empty: str | None, none: str | None) -> bool:
    """Whether None did no worse than "": a template may refuse the conversation either way."""
    if empty is None:
        return True
    return none is not None and all(none.count(word) == empty.count(word) for word in NOTHING)


def _user(content: Any) -> Message:
    return {"role": "user", "content": content}


def _reply(content: str | None, **fields: Any) -> Message:
    return {"role": "assistant", "content": content, **fields}


def _text(part: Any) -> str:
    """The text of a part; any other kind is refused rather than left out."""
    match part:
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": str(kind)}:
            raise TemplateFailed(
                f"This model's chat template takes text only, not content of type '{kind}'."
            )
    raise TemplateFailed("A part of a message's content needs a type and, as text, a text.")
