"""How one model writes its replies: tool calls and reasoning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rekindle.chat.grammar.reply import ReplyGrammars
from rekindle.chat.reasoning import ReasoningFormat, ReasoningParser
from rekindle.chat.tools.base import PlainTextParser, ReplyParser
from rekindle.chat.tools.format import ReplyContext, ToolFormat
from rekindle.chat.tools.parameters import Tools


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """A tool format together with a reasoning format."""

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
        """Texts of the control tokens that end a reply beside the model's end tokens."""
        return self.tools.end_markers

    def parser(self, tools: Tools, *, calls: bool, opened: bool) -> ReplyParser:
        """A parser for one reply; without `calls`, it only tells reasoning from text."""
        context = ReplyContext(tools, calls, opened)
        if self.tools.reasoning is not None:
            return self.tools.parser(context)
        parser = self.tools.parser(context) if calls else PlainTextParser()
        if self.reasoning is None:
            return parser
        return ReasoningParser(self.reasoning, parser, opened=opened)

    def opens_reasoning(self, prompt: str) -> bool:
        """Whether a rendered prompt ends inside reasoning."""
        return self.reasoning is not None and self.reasoning.is_open(prompt)

    def grammars(self, control: Mapping[str, int]) -> ReplyGrammars:
        """The grammars of its replies, for a model with these control tokens."""
        syntax = self.tools.syntax(control) if self.tools.syntax else None
        return ReplyGrammars(self.name, syntax, self.reasoning, control)
