"""How replies are written, as grammars: reasoning, then calls between markers, or an answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from rekindle.chat.grammar.lark import TEXT, Rules, blanks, either, literal
from rekindle.chat.grammar.tool import Tool
from rekindle.chat.reasoning import ReasoningFormat


@dataclass(frozen=True, slots=True)
class ReplyStart:
    """How a reply may begin."""

    reasoning: ReasoningFormat | None
    opened: bool  # the prompt ends inside reasoning


@dataclass(frozen=True, slots=True)
class CallRules:
    """What a reply that may call tools has to match."""

    required: bool
    most_calls: int
    answer: str | None  # the expression that a reply without calls has to match


class ReplySyntax(Protocol):
    """The expressions of a format's replies."""

    @property
    def text(self) -> str:
        """A regular expression of the text that is no call."""

    def calls(
        self, rules: Rules, tools: Sequence[Tool], wanted: CallRules, start: ReplyStart
    ) -> str:
        """A reply that may call these tools, or has to."""

    def answer(self, rules: Rules, answer: str, start: ReplyStart) -> str:
        """A reply that is nothing but an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSyntax:
    """Calls are written one by one between `trigger` and `close`, or all in one block."""

    call: Callable[[Rules, Tool], str]
    trigger: str = ""  # the text that distinguishes calls from other text
    optional_trigger: bool = False  # calls may begin without it
    lead: str = ""  # between the trigger and the first call
    comma: str = ""  # between the calls of a block
    close: str = ""
    gap: str | None = None  # between blocks; None: there is one block
    bare: str = ""  # at the beginning of a reply, this character begins calls without a trigger

    @property
    def text(self) -> str:
        if not self.bare:
            return TEXT
        return rf"(?s:\s*|\s*[^\s\{self.bare}].*)"

    def calls(
        self, rules: Rules, tools: Sequence[Tool], wanted: CallRules, start: ReplyStart
    ) -> str:
        if wanted.required or wanted.answer:
            body = self._calls_alone(rules, tools, wanted.most_calls)
        else:
            body = self._calls_in_text(rules, tools, wanted.most_calls)
        if wanted.answer:
            body = either((body, wanted.answer))
        return after_reasoning(rules, body, start)

    def answer(self, rules: Rules, answer: str, start: ReplyStart) -> str:
        return after_reasoning(rules, answer, start)

    def _calls_alone(self, rules: Rules, tools: Sequence[Tool], most: int) -> str:
        trigger = rules.marker(self.trigger)
        if trigger and self.optional_trigger:
            trigger = f"({trigger})?"
        opening = f"{trigger} {rules.marker(self.lead)}"
        if self.gap is None:
            return f"{opening} {self._block(rules, tools, most)}"
        return rules.repeated(f"{opening} {self._block(rules, tools, 1)}", self.gap, most)

    def _calls_in_text(self, rules: Rules, tools: Sequence[Tool], most: int) -> str:
        """Text, and calls wherever their trigger is written."""
        in_block, blocks = (most, 1) if self.gap is None else (1, most)
        calls = rules.rule(f"{rules.marker(self.lead)} {self._block(rules, tools, in_block)}")
        ways = [rules.text]
        if self.trigger:
            ways = [f"({rules.until(self.trigger)} {calls}){{0,{blocks}}} {rules.text}"]
        if self.bare:
            ways.append(calls)
        return either(ways)

    def _block(self, rules: Rules, tools: Sequence[Tool], most: int) -> str:
        """Calls, and the end of the block that they are in."""
        one = either(rules.rule(self.call(rules, tool)) for tool in tools)
        return f"{rules.repeated(one, self.comma, most)} {rules.marker(self.close)}"


def json_call(rules: Rules, tool: Tool) -> str:
    """`{"name": …, "arguments": {…}}`"""
    start = literal(f'{{"name": {literal(tool.name)}, "arguments": ')
    return f"{start} {json_arguments(rules, tool)} {literal('}')}"


def json_arguments(rules: Rules, tool: Tool) -> str:
    return rules.json(tool.schema, lenient=tool.lenient)


def after_reasoning(rules: Rules, body: str, start: ReplyStart) -> str:
    """The body after the rest of reasoning that is open, or after a whole one or none."""
    if start.reasoning is None:
        return body
    begin, end = start.reasoning
    rest = f"{rules.until(end, rules.terminal(f'/{TEXT}/'))} {blanks()}"
    return f"{rest} {body}" if start.opened else f"({rules.marker(begin)} {rest})? {body}"
