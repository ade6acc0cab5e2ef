"""A tool format: everything about one way of writing calls, declared in one module.

A module of this package that declares `FORMATS`, a tuple of ToolFormat, is found by the registry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rekindle.chat.grammar.syntax import ReplySyntax
from rekindle.chat.reasoning import ReasoningFormat
from rekindle.chat.tools.base import ReplyParser
from rekindle.chat.tools.parameters import Tools

ControlTokens = Mapping[str, int]  # the text of each control token, and its id


@dataclass(frozen=True, slots=True)
class TemplatePattern:
    """Texts that a chat template of this format contains, all of them.

    Of the patterns that match a template, the one of the highest precedence decides.
    """

    precedence: int
    texts: tuple[str, ...]

    def matches(self, template: str) -> bool:
        return all(text in template for text in self.texts)


@dataclass(frozen=True, slots=True)
class ReplyContext:
    """What a parser has to know about the reply it will read."""

    tools: Tools
    calls: bool = True  # the reply may call tools
    opened: bool = False  # the prompt ends inside reasoning


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """How models of one kind write tool calls."""

    name: str
    parser: Callable[[ReplyContext], ReplyParser]
    # How calls are written, given the model's control tokens; None: the format has no calls.
    syntax: Callable[[ControlTokens], ReplySyntax] | None = None
    template_patterns: tuple[TemplatePattern, ...] = ()
    markers: tuple[str, ...] = ()  # texts of control tokens that the parser must see
    end_markers: tuple[str, ...] = ()  # texts of further control tokens that end a reply
    # Reasoning that is a part of the format: `parser` and `syntax` then handle it themselves.
    reasoning: ReasoningFormat | None = None
