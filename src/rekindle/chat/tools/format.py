"""Declares what a tool format and a reply format are.

The registry finds every ToolFormat that a module of this package declares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rekindle.chat.grammar.reply import ReplyGrammars, ReplySyntax
from rekindle.chat.reasoning import ReasoningFormat, ReasoningParser
from rekindle.chat.tools.stream import ReplyContext, ReplyParser, Tools

ControlTokens = Mapping[str, int]  # the text of each control token, and its id


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """How one kind of model writes tool calls."""

    name: str
    parser: Callable[[ReplyContext], ReplyParser]
    # The grammar of calls for a model's control tokens. None if the format has no calls.
    syntax: Callable[[ControlTokens], ReplySyntax] | None = None
    markers: tuple[str, ...] = ()  # texts of control tokens that the parser must see
    end_markers: tuple[str, ...] = ()  # texts of additional control tokens that end a reply
    # Reasoning that is part of the format. `parser` and `syntax` then handle it themselves.
    reasoning: ReasoningFormat | None = None


PLAIN_FORMAT = ToolFormat(name="plain", parser=ReplyParser)


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """How one model writes replies: a tool format and a reasoning format."""

    tools: ToolFormat
    reasoning: ReasoningFormat | None

    @property
    def name(self) -> str:
        return self.tools.name

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts of the control tokens that the parser must see."""
        if self.reasoning is None or self.tools.reasoning is not None:
            return self.tools.markers
        return tuple(dict.fromkeys((*self.tools.markers, *self.reasoning.control_markers)))

    @property
    def end_markers(self) -> tuple[str, ...]:
        return self.tools.end_markers

    def parser(self, tools: Tools, *, calls: bool, opened: bool) -> ReplyParser:
        """A parser for one reply. Without `calls`, it only separates reasoning from text."""
        context = ReplyContext(tools, calls, opened)
        if self.tools.reasoning is not None:
            return self.tools.parser(context)
        parser = self.tools.parser(context) if calls else ReplyParser(context)
        if self.reasoning is None:
            return parser
        return ReasoningParser(context, self.reasoning, parser)

    def grammars(self, control: ControlTokens) -> ReplyGrammars:
        syntax = self.tools.syntax(control) if self.tools.syntax else None
        return ReplyGrammars(self.name, syntax, self.reasoning, control)
