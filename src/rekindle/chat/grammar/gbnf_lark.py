"""GBNF translated into llguidance's Lark.

GBNF describes characters. llguidance first splits text into terminals and prefers the longest: of
two terminals, `[a-z]+ "end"` would match nothing, and `"ab" "c" | "a" "bd"` no `abd`. A grammar
without recursion therefore becomes one regular expression, and one with recursion has terminals of
single characters, between which there is nothing to prefer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rekindle.chat.grammar.gbnf import (
    ROOT,
    Characters,
    Choice,
    Node,
    Reference,
    Repeat,
    Sequence,
    parse,
)

MOST_REGEX_CHARACTERS = 20_000  # references are written out: rules that double would not end
MOST_REGEX_DEPTH = 50  # llguidance's reader of regular expressions goes a few hundred deep
_ANY = "(?s:.)"


def gbnf_to_lark(text: str) -> str:
    """The same grammar in Lark; raises InvalidGbnf."""
    rules = parse(text)
    try:
        return f"start: /{_Regex(rules).of(Reference(ROOT))}/"
    except _NotRegular:
        return _as_rules(rules)


class _NotRegular(Exception):
    """A rule contains itself, or the expression gets too large."""


@dataclass(slots=True)
class _Regex:
    """Writes nodes as one regular expression."""

    rules: Mapping[str, Node]
    inside: list[str] = field(default_factory=list)  # the rules being written
    known: dict[str, str] = field(default_factory=dict)
    depth: int = 0

    def of(self, node: Node) -> str:
        self.depth += 1
        if self.depth > MOST_REGEX_DEPTH:
            raise _NotRegular
        text = self._written(node)
        self.depth -= 1
        if len(text) > MOST_REGEX_CHARACTERS:
            raise _NotRegular
        return text

    def _written(self, node: Node) -> str:
        match node:
            case Characters():
                return _class(node)
            case Sequence(items):
                return "".join(map(self.of, items))
            case Choice(ways):
                return f"(?:{'|'.join(map(self.of, ways))})"
            case Repeat(item):
                return f"(?:{self.of(item)}){_bounds(node)}"
            case Reference(name):
                return self._rule(name)

    def _rule(self, name: str) -> str:
        if name in self.inside:
            raise _NotRegular
        if name not in self.known:
            self.inside.append(name)
            self.known[name] = self.of(self.rules[name])
            self.inside.pop()
        return self.known[name]


def _as_rules(rules: Mapping[str, Node]) -> str:
    # Names of our own: Lark's may not contain dashes, and capitals make a terminal of a rule.
    names = {name: f"rule{number}" for number, name in enumerate(rules)}
    lines = [f"start: {names[ROOT]}"]
    lines += (f"{names[name]}: {_expression(rules[name], names)}" for name in rules)
    return "\n".join(lines)


def _expression(node: Node, names: Mapping[str, str]) -> str:
    match node:
        case Characters():
            return f"/{_class(node)}/"
        case Sequence(items):
            return f"({' '.join(_expression(each, names) for each in items)})" if items else '""'
        case Choice(ways):
            return f"({' | '.join(_expression(each, names) for each in ways)})"
        case Repeat(item):
            return f"({_expression(item, names)}){_bounds(node)}"
        case Reference(name):
            return names[name]


def _class(node: Characters) -> str:
    if not node.ranges:
        return _ANY
    spelled = "".join(
        _code(first) if first == last else f"{_code(first)}-{_code(last)}"
        for first, last in node.ranges
    )
    single = not node.negated and len(node.ranges) == 1 and node.ranges[0][0] == node.ranges[0][1]
    return spelled if single else f"[{'^' if node.negated else ''}{spelled}]"


def _code(code: int) -> str:
    character = chr(code)
    return character if character.isascii() and character.isalnum() else f"\\x{{{code:X}}}"


def _bounds(node: Repeat) -> str:
    match node.least, node.most:
        case 0, None:
            return "*"
        case 1, None:
            return "+"
        case 0, 1:
            return "?"
        case least, None:
            return f"{{{least},}}"
    return f"{{{node.least},{node.most}}}"
