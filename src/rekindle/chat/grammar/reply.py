"""Writes the grammars of one model's replies: reasoning, then calls of tools or an answer."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from llguidance import regex_to_lark

from rekindle.chat.grammar.arguments import PARAM, Tool, callable_tools
from rekindle.chat.grammar.gbnf import InvalidGbnf, gbnf_to_lark
from rekindle.chat.grammar.lark import BLANKS, TEXT, Grammar, Rules, either, literal
from rekindle.chat.grammar.schema import as_object, check
from rekindle.chat.grammar.trial import check_lark
from rekindle.chat.reasoning import ReasoningFormat
from rekindle.errors import BadRequest, Unsupported
from rekindle.protocol.requests import StructuredOutput, ToolUse

Tools = Sequence[Mapping[str, Any]]

MAX_CALLS = 32  # in one reply. A small model would call without end

_COMMENT_OR_STRING = re.compile(r'"(?:[^"\\\n]|\\.)*"|#[^\n]*|//[^\n]*')


@dataclass(frozen=True, slots=True)
class ReplyStart:
    reasoning: ReasoningFormat | None
    opened: bool  # the prompt ends inside reasoning


@dataclass(frozen=True, slots=True)
class CallRules:
    tools: Sequence[Tool]  # that may be called
    required: bool
    max_calls: int
    answer: str | None  # the expression of a reply without calls


class ReplySyntax(Protocol):
    """Writes the expressions of a format's replies."""

    @property
    def text(self) -> str:
        """A regular expression of text that is not a call."""

    def calls(self, rules: Rules, wanted: CallRules, start: ReplyStart) -> str:
        """A reply that may call tools, or has to."""

    def answer(self, rules: Rules, answer: str, start: ReplyStart) -> str:
        """A reply that is only an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSyntax:
    """Calls between `trigger` and `close`, each in its own block or all in one."""

    call: Callable[[Rules, Tool], str]
    trigger: str = ""  # the text that distinguishes calls from other text
    optional_trigger: bool = False  # calls may begin without it
    lead: str = ""  # between the trigger and the first call
    comma: str = ""  # between the calls of a block
    close: str = ""
    gap: str | None = None  # between blocks. None if there is only one block
    bare: str = ""  # at the beginning of a reply, this character begins calls without a trigger

    @property
    def text(self) -> str:
        return rf"(?s:\s*|\s*[^\s\{self.bare}].*)" if self.bare else TEXT

    def calls(self, rules: Rules, wanted: CallRules, start: ReplyStart) -> str:
        alone = wanted.required or wanted.answer
        body = (self._calls_alone if alone else self._calls_in_text)(rules, wanted)
        if wanted.answer:
            body = either((body, wanted.answer))
        return after_reasoning(rules, body, start)

    def answer(self, rules: Rules, answer: str, start: ReplyStart) -> str:
        return after_reasoning(rules, answer, start)

    def _calls_alone(self, rules: Rules, wanted: CallRules) -> str:
        trigger = rules.marker(self.trigger)
        if trigger and self.optional_trigger:
            trigger = f"({trigger})?"
        opening = f"{trigger} {rules.marker(self.lead)}"
        if self.gap is None:
            return f"{opening} {self._block(rules, wanted.tools, wanted.max_calls)}"
        one = f"{opening} {self._block(rules, wanted.tools, 1)}"
        return rules.repeated(one, self.gap, wanted.max_calls)

    def _calls_in_text(self, rules: Rules, wanted: CallRules) -> str:
        most = wanted.max_calls
        in_block, blocks = (most, 1) if self.gap is None else (1, most)
        block = self._block(rules, wanted.tools, in_block)
        calls = rules.rule(f"{rules.marker(self.lead)} {block}")
        ways = [rules.text]
        if self.trigger:
            ways = [f"({rules.until(self.trigger)} {calls}){{0,{blocks}}} {rules.text}"]
        if self.bare:
            ways.append(calls)
        return either(ways)

    def _block(self, rules: Rules, tools: Sequence[Tool], most: int) -> str:
        one = either(rules.rule(self.call(rules, tool)) for tool in tools)
        return f"{rules.repeated(one, self.comma, most)} {rules.marker(self.close)}"


def is_strict(tool: object) -> bool:
    """Whether every call of this tool has to follow its schema."""
    function = tool.get("function") if isinstance(tool, Mapping) else None
    return isinstance(function, Mapping) and bool(function.get("strict"))


def json_call(rules: Rules, tool: Tool) -> str:
    """`{"name": …, "arguments": {…}}`"""
    start = literal(f'{{"name": {literal(tool.name)}, "arguments": ')
    return f"{start} {json_arguments(rules, tool)} {literal('}')}"


def json_arguments(rules: Rules, tool: Tool) -> str:
    return rules.json(tool.schema, lenient=tool.lenient)


def after_reasoning(rules: Rules, body: str, start: ReplyStart) -> str:
    """The body after the rest of open reasoning, or after optional reasoning."""
    if start.reasoning is None:
        return body
    begin, end = start.reasoning
    rest = f"{rules.until(end, rules.terminal(f'/{TEXT}/'))} {BLANKS}"
    return f"{rest} {body}" if start.opened else f"({rules.marker(begin)} {rest})? {body}"


@dataclass(frozen=True, slots=True)
class ReplyGrammars:
    """Writes the grammar of a reply. `opened` means that the prompt ends inside reasoning."""

    format_name: str
    syntax: ReplySyntax | None  # None if the format has no calls
    reasoning: ReasoningFormat | None
    control: Mapping[str, int]  # the text of each control token, and its id

    def calls(
        self, tools: Tools, use: ToolUse, *, opened: bool, answer: StructuredOutput | None = None
    ) -> Grammar | None:
        """A reply that has to call, or whose calls have to follow strict schemas.

        With `answer`, a reply without calls has to be such an answer. Returns None for a reply
        without constraints.
        """
        required = use.choice == "required"
        if required and self.syntax is None:
            raise Unsupported(
                f"This model's replies are read as {self.format_name}, which has no calls.",
                param="tool_choice",
            )
        if self.syntax is None or not tools:
            return None if answer is None else self.answer(answer, opened=opened)
        if not required and answer is None and not any(map(is_strict, tools)):
            return None
        rules = Rules(self.control, PARAM, self.syntax.text)
        wanted = CallRules(
            answer=None if answer is None or required else self._expression(rules, answer),
            tools=callable_tools(tools, use.name),
            required=required,
            max_calls=_max_calls(use),
        )
        start = ReplyStart(self.reasoning, opened)
        return rules.grammar(self.syntax.calls(rules, wanted, start))

    def answer(self, output: StructuredOutput, *, opened: bool) -> Grammar:
        """A reply that is only an answer, after its reasoning."""
        rules = Rules(self.control, output.param)
        start = ReplyStart(self.reasoning, opened)
        write = after_reasoning if self.syntax is None else self.syntax.answer
        return rules.grammar(write(rules, self._expression(rules, output), start))

    def text(self, output: StructuredOutput) -> Grammar:
        """A completion that is only an answer."""
        rules = Rules(self.control, output.param)
        return rules.grammar(self._expression(rules, output))

    def _expression(self, rules: Rules, output: StructuredOutput) -> str:
        """The expression of an answer. Raises BadRequest for what cannot be enforced."""
        param = output.param
        if output.grammar is not None:
            lark = _as_lark(output.grammar, param)
            check_lark(lark, param)
            return rules.rule(f"%lark {{\n{lark}\n}}")
        if output.regex is not None:
            pattern = f"/{_regex(output.regex)}/"
            check_lark(f"start: {pattern}", param)
            return rules.terminal(pattern)
        if output.choices is not None:
            return rules.rule(either(map(literal, output.choices)))
        check(output.schema, param=param)
        return rules.json(as_object(output.schema, param=param))


def _max_calls(use: ToolUse) -> int:
    if not use.parallel or use.name is not None:
        return 1
    return min(use.max_calls or MAX_CALLS, MAX_CALLS)


def _as_lark(grammar: str, param: str) -> str:
    """Recognises GBNF by how it defines a rule. Anything else is read as Lark."""
    if "::=" not in _COMMENT_OR_STRING.sub("", grammar):
        return grammar
    try:
        return gbnf_to_lark(grammar)
    except InvalidGbnf as error:
        raise BadRequest(f"The grammar is not valid GBNF: {error}.", param=param) from None


def _regex(pattern: str) -> str:
    """Remove anchors from the ends of a pattern. The whole reply has to match it anyway."""
    body = pattern.removeprefix("^")
    if body.endswith("$") and not body.endswith("\\$"):
        body = body[:-1]
    return regex_to_lark(body, "dw")
