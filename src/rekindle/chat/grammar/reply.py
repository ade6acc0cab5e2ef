"""The grammars of one model's replies: calls that follow their tools' schemas, or an answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rekindle.chat.grammar.answer import expression
from rekindle.chat.grammar.lark import Grammar, Rules
from rekindle.chat.grammar.syntax import CallRules, ReplyStart, ReplySyntax, after_reasoning
from rekindle.chat.grammar.tool import PARAM, callable_tools, is_strict
from rekindle.chat.grammar.trial import Trials
from rekindle.chat.reasoning import ReasoningFormat
from rekindle.errors import Unsupported
from rekindle.protocol.requests import StructuredOutput, ToolUse

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
