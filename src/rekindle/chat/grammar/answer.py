"""What a reply's text has to be, as an expression of its grammar."""

from __future__ import annotations

import re

from llguidance import regex_to_lark

from rekindle.chat.grammar.gbnf import InvalidGbnf
from rekindle.chat.grammar.gbnf_lark import gbnf_to_lark
from rekindle.chat.grammar.lark import Rules, either, literal
from rekindle.chat.grammar.schema import as_object, check
from rekindle.chat.grammar.trial import Trials
from rekindle.errors import BadRequest
from rekindle.protocol.requests import StructuredOutput

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
