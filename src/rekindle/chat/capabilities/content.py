"""The forms of message content, and which of them a template renders.

OpenAI lets content be a string, a list of parts or nothing; most templates were written for one
of the three.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rekindle.chat.capabilities.probe import NEEDLE, Render, attempt, shows_needle
from rekindle.chat.messages import Message, content_text
from rekindle.errors import TemplateFailed

_PRINTED_NONE = ("None", "null")  # as Python and as JSON prints it
_CALL = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": {}}}


@dataclass(frozen=True, slots=True)
class ContentForms:
    """What a template takes as content: a string, a list of parts, None in a reply."""

    text: bool
    parts: bool
    none: bool

    def adapt(self, message: Message) -> Message:
        """The same message with its content in a form the template takes."""
        content = message.get("content")
        if content is None and message.get("role") == "assistant":
            return {**message, "content": None if self.none else ""}
        if isinstance(content, str) and self.parts and not self.text:
            return {**message, "content": [{"type": "text", "text": content}]}
        # Templates iterate over the parts of user messages, but print a tool's result as it is.
        is_result = self.text and message.get("role") == "tool"
        if isinstance(content, list) and (is_result or not self.parts):
            return {**message, "content": text_only(content)}
        return message


def probe(render: Render) -> ContentForms:
    """Which forms `render` takes."""
    return ContentForms(
        text=shows_needle(attempt(render, [_user(NEEDLE)])),
        parts=shows_needle(attempt(render, [_user([{"type": "text", "text": NEEDLE}])])),
        none=_takes_none(render) and _takes_none(render, tool_calls=[_CALL]),
    )


def text_only(content: Any) -> str:
    """Content as one text; TemplateFailed for a part that is not text, rather than losing it."""
    if isinstance(content, list):
        for part in content:
            _check_text(part)
        return content_text(content)
    return "" if content is None else str(content)


def _takes_none(render: Render, **fields: Any) -> bool:
    """Whether None does no worse than "": a template may refuse the conversation either way."""

    def rendered(content: str | None) -> str | None:
        reply = {"role": "assistant", "content": content, **fields}
        return attempt(render, [_user(NEEDLE), reply])

    empty, none = rendered(""), rendered(None)
    if empty is None:
        return True
    return none is not None and all(none.count(each) == empty.count(each) for each in _PRINTED_NONE)


def _user(content: Any) -> Message:
    return {"role": "user", "content": content}


def _check_text(part: Any) -> None:
    match part:
        case {"type": "text", "text": str()}:
            return
        case {"type": str(kind)}:
            raise TemplateFailed(
                f"This model's chat template takes text only, not content of type '{kind}'."
            )
    raise TemplateFailed("A part of a message's content needs a type and, as text, a text.")
