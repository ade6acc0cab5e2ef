"""Replies without any calls."""

from __future__ import annotations

from rekindle.chat.tools.base import PlainTextParser
from rekindle.chat.tools.format import ToolFormat

FORMATS = (ToolFormat(name="plain", parser=lambda reply: PlainTextParser()),)
