"""GBNF, the notation in which llama.cpp takes grammars (xgrammar's EBNF is the same), as a tree."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NoReturn

MOST_DEPTH = 64  # of parentheses
MOST_DIGITS = 9  # of a repetition's bounds
ROOT = "root"

_TOKEN = re.compile(
    r"""(?P<blank>(?:\s|\#[^\n]*)+)
      | (?P<name>[A-Za-z0-9_-]+)
      | (?P<defined>::=)
      | (?P<string>"(?:[^"\\]|\\.)*")
      | (?P<chars>\[(?:[^\]\\]|\\.)*\])
      | (?P<bounds>\{[\d\s,]*\})
      | (?P<sign>[|()*+?.])""",
    re.VERBOSE | re.DOTALL,
)
_CHARACTER = re.compile(
    r"\\x([0-9A-Fa-f]{2})|\\u([0-9A-Fa-f]{4})|\\U([0-9A-Fa-f]{8})|\\(.)|(.)", re.DOTALL
)
_BOUNDS = re.compile(rf"\{{\s*(\d{{1,{MOST_DIGITS}}})?\s*(?:(,)\s*(\d{{1,{MOST_DIGITS}}})?\s*)?\}}")
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t", **{each: each for each in '\\"[]^-'}}
_REPEATS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}


class InvalidGbnf(ValueError):
    """The text is no GBNF; the message says what is wrong and where."""


@dataclass(frozen=True, slots=True)
class Characters:
    """One character of a class."""

    ranges: tuple[tuple[int, int], ...]  # code points, the last included
    negated: bool = False


@dataclass(frozen=True, slots=True)
class Reference:
    name: str


@dataclass(frozen=True, slots=True)
class Sequence:
    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    ways: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    item: Node
    least: int
    most: int | None  # None: any number


Node = Characters | Reference | Sequence | Choice | Repeat

ANY = Characters((), negated=True)


def parse(text: str) -> dict[str, Node]:
    """The grammar's rules by their names, each of which is defined; raises InvalidGbnf."""
    return _Parser(text).rules()


class _Parser:
    """Line breaks mean nothing: a name that is followed by `::=` begins the next rule."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = self._split()
        self._at = 0
        self._depth = 0

    def _split(self) -> list[tuple[str, str, int]]:
        """Kind, text and place of each token, with an empty one at the end."""
        tokens, at = [], 0
        while at < len(self._text):
            found = _TOKEN.match(self._text, at)
            if found is None or found.lastgroup is None:
                self._fail(f"cannot read {self._text[at : at + 20]!r}", at)
            if found.lastgroup != "blank":
                tokens.append((found.lastgroup, found[0], at))
            at = found.end()
        return [*tokens, ("end", "", at)]

    def _fail(self, problem: str, at: int | None = None) -> NoReturn:
        place = self._tokens[self._at][2] if at is None else at
        raise InvalidGbnf(f"line {self._text.count(chr(10), 0, place) + 1}: {problem}")

    def rules(self) -> dict[str, Node]:
        found: dict[str, Node] = {}
        while self._kind() != "end":
            name = self._tokens[self._at][1]
            if not self._begins_rule():
                self._fail(f"a rule begins with `name ::=`, not with {name[:20]!r}")
            if name in found:
                self._fail(f"the rule {name!r} is defined twice")
            self._at += 2
            found[name] = self._choice()
        if ROOT not in found:
            raise InvalidGbnf(f"there is no rule called {ROOT!r}")
        for kind, name, at in self._tokens:
            if kind == "name" and name not in found:
                self._fail(f"the rule {name!r} is not defined", at)
        return found

    def _kind(self) -> str:
        return self._tokens[self._at][0]

    def _begins_rule(self) -> bool:
        return self._kind() == "name" and self._tokens[self._at + 1][0] == "defined"

    def _take(self, sign: str) -> bool:
        found = self._tokens[self._at][:2] == ("sign", sign)
        self._at += found
        return found

    def _choice(self) -> Node:
        ways = [self._sequence()]
        while self._take("|"):
            ways.append(self._sequence())
        return ways[0] if len(ways) == 1 else Choice(tuple(ways))

    def _sequence(self) -> Node:
        items: list[Node] = []
        while not self._begins_rule() and (item := self._item()) is not None:
            items.append(self._repeated(item))
        return items[0] if len(items) == 1 else Sequence(tuple(items))

    def _item(self) -> Node | None:
        kind, text, at = self._tokens[self._at]
        if kind == "sign" and text == "(":
            return self._group()
        if kind == "sign" and text == ".":
            self._at += 1
            return ANY
        if kind not in ("name", "string", "chars"):
            return None
        self._at += 1
        match kind:
            case "name":
                return Reference(text)
            case "string":
                codes = [code for code, _ in self._codes(text[1:-1], at)]
                return Sequence(tuple(Characters(((code, code),)) for code in codes))
        return self._class(text[1:-1], at)

    def _group(self) -> Node:
        self._at += 1
        self._depth += 1
        if self._depth > MOST_DEPTH:
            self._fail(f"parentheses may be nested at most {MOST_DEPTH} deep")
        inner = self._choice()
        if not self._take(")"):
            self._fail("a `)` is missing")
        self._depth -= 1
        return inner

    def _repeated(self, item: Node) -> Node:
        while True:
            kind, text, _ = self._tokens[self._at]
            if kind == "bounds":
                item = Repeat(item, *self._bounds(text))
            elif kind == "sign" and text in _REPEATS:
                item = Repeat(item, *_REPEATS[text])
            else:
                return item
            self._at += 1

    def _bounds(self, text: str) -> tuple[int, int | None]:
        found = _BOUNDS.fullmatch(text)
        if found is None or not (found[1] or found[3]):
            self._fail(f"cannot read the repetition {text[:20]!r}")
        least = int(found[1] or 0)
        most = least if not found[2] else int(found[3]) if found[3] else None
        if most is not None and most < least:
            self._fail(f"the repetition {text[:20]!r} ends before it begins")
        return least, most

    def _class(self, text: str, at: int) -> Characters:
        negated = text.startswith("^")
        codes = self._codes(text[negated:], at)
        if not codes:
            self._fail("a class of characters is empty", at)
        ranges, place = [], 0
        while place < len(codes):
            first = last = codes[place][0]
            if codes[place + 1 : place + 2] == [(ord("-"), False)] and place + 2 < len(codes):
                last = codes[place + 2][0]
                place += 2
            if last < first:
                self._fail(f"the range {chr(first)}-{chr(last)} ends before it begins", at)
            ranges.append((first, last))
            place += 1
        return Characters(tuple(ranges), negated)

    def _codes(self, text: str, at: int) -> list[tuple[int, bool]]:
        """The code point of each character, and whether it was escaped."""
        codes = []
        for found in _CHARACTER.finditer(text):
            number = found[1] or found[2] or found[3]
            if number is None and found[4] is not None and found[4] not in _ESCAPED:
                self._fail(f"unknown escape {found[0]!r}", at)
            code = int(number, 16) if number else ord(_ESCAPED.get(found[4], found[5]) or "")
            if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
                self._fail(f"{found[0]} is no character", at)
            codes.append((code, found[5] is None))
        return codes


# ----------------------------------------------------------------------
# GBNF translated into llguidance's Lark.
#
# GBNF describes characters. llguidance first splits text into terminals and prefers the longest:
# of two terminals, `[a-z]+ "end"` would match nothing, and `"ab" "c" | "a" "bd"` no `abd`. A
# grammar without recursion therefore becomes one regular expression, and one with recursion has
# terminals of single characters, between which there is nothing to prefer.

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
