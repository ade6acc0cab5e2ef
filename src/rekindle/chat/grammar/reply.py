"""The grammars of one model's replies: calls that follow their tools' schemas, or an answer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llguidance import regex_to_lark

from rekindle.chat.grammar.gbnf import InvalidGbnf, gbnf_to_lark
from rekindle.chat.grammar.lark import Grammar, Rules, either, literal
from rekindle.chat.grammar.schema import as_object, check
from rekindle.chat.grammar.syntax import CallRules, ReplyStart, ReplySyntax, after_reasoning
from rekindle.chat.grammar.tool import PARAM, callable_tools, is_strict
from rekindle.chat.grammar.trial import Trials
from rekindle.chat.reasoning import ReasoningFormat
from rekindle.errors import BadRequest, Unsupported
from rekindle.protocol.requests import StructuredOutput, ToolUse

# ----------------------------------------------------------------------
# What a reply's text has to be, as an expression of its grammar.

_COMMENT_OR_STRING = re.compile(r'"(?:[^"\\\n]|\\.)*"|#[^\n]*|//[^\n]*')


def expression(rules: Rules, output: StructuredOutput, trials: Trials) -> str:
    """Raises BadRequest, which names the request's field, for what cannot be enforced."""
    if output.grammar is not None:
        lark = _as_lark(output.grammar, output.param)
        trials.check(lark, output.param)
        return rules.rule(f"%lark {{\n{lark}\n}}")
    if output.regex is not None:
        pattern = f"/{_regex(output.regex)}/"
        trials.check(f"start: {pattern}", output.param)
        return rules.terminal(pattern)
    if output.choices is not None:
        return rules.rule(either(map(literal, output.choices)))
    check(output.schema, param=output.param)
    return rules.json(as_object(output.schema, param=output.param))


def _as_lark(grammar: str, param: str) -> str:
    """GBNF is recognised by how it defines a rule; anything else is taken for Lark."""
    if "::=" not in _COMMENT_OR_STRING.sub("", grammar):
        return grammar
    try:
        return gbnf_to_lark(grammar)
    except InvalidGbnf as error:
        raise BadRequest(f"The grammar is no valid GBNF: {error}.", param=param) from None


def _regex(pattern: str) -> str:
    """The reply as a whole has to match: anchors at both ends say nothing more."""
    body = pattern.removeprefix("^")
    if body.endswith("$") and not body.endswith("\\$"):
        body = body[:-1]
    return regex_to_lark(body, "dw")


Tools = Sequence[Mapping[str, Any]]

MOST_CALLS = 32  # of one reply: a small model would go on for ever


@dataclass(frozen=True, slots=True)
class ReplyGrammars:
    """Writes the grammar that a reply has to follow. `opened`: the prompt ends inside reasoning."""

    format_name: str
    syntax: ReplySyntax | None  # None: the format has no calls
    reasoning: ReasoningFormat | None
    control: Mapping[str, int]  # the text of each control token, and its id
    trials: Trials = field(default_factory=Trials)

    def calls(
        self, tools: Tools, use: ToolUse, *, opened: bool, answer: StructuredOutput | None = None
    ) -> Grammar | None:
        """A reply that has to call, or whose calls have to follow strict schemas.

        None where the reply is not constrained. With `answer`, a reply that does not call is one.
        """
        required = use.choice == "required"
        if required and self.syntax is None:
            raise Unsupported(
                f"This model's replies are read as {self.format_name}, which has no calls.",
                param="tool_choice",
            )
        if self.syntax is None or not tools:
            return None if answer is None else self.answer(answer, opened=opened)
        if not required and answer is None and not is_strict(tools):
            return None
        rules = Rules(self.control, PARAM, self.syntax.text)
        wanted = CallRules(
            required=required,
            most_calls=MOST_CALLS if use.parallel and use.name is None else 1,
            answer=None if answer is None or required else self._expression(rules, answer),
        )
        start = ReplyStart(self.reasoning, opened)
        offered = callable_tools(tools, use.name)
        return rules.grammar(self.syntax.calls(rules, offered, wanted, start))

    def answer(self, output: StructuredOutput, *, opened: bool) -> Grammar:
        """A reply that is nothing but such an answer, after its reasoning."""
        rules = Rules(self.control, output.param)
        start = ReplyStart(self.reasoning, opened)
        write = after_reasoning if self.syntax is None else self.syntax.answer
        return rules.grammar(write(rules, self._expression(rules, output), start))

    def text(self, output: StructuredOutput) -> Grammar:
        """A completion that is nothing but such an answer."""
        rules = Rules(self.control, output.param)
        return rules.grammar(self._expression(rules, output))

    def _expression(self, rules: Rules, output: StructuredOutput) -> str:
        return expression(rules, output, self.trials)
