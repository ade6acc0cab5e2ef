"""Messages and their content, which OpenAI lets be a string, a list of parts or nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Message = Mapping[str, Any]


def content_text(content: Any) -> str:
    """The text in a message's content, its text parts joined by line feeds."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    texts = (part.get("text") for part in content if isinstance(part, Mapping))
    return "\n".join(text for text in texts if isinstance(text, str))
