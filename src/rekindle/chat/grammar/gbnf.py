"""Translates GBNF, llama.cpp's notation for grammars, into llguidance's Lark.

xgrammar's EBNF is the same notation. GBNF describes characters. llguidance first splits text into
terminals and prefers the longest one: with two terminals, `[a-z]+ "end"` would match nothing, and
`"ab" "c" | "a" "bd"` would not match `abd`. A grammar without recursion therefore becomes one
regular expression. A grammar with recursion gets one terminal for each character.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NoReturn

MAX_DEPTH = 64  # of parentheses
# References are written out in place, so rules that double each other would grow without end.
MAX_REGEX_CHARACTERS = 20_000
MAX_REGEX_DEPTH = 50  # llguidance parses regular expressions a few hundred levels deep
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
_BOUNDS = re.compile(r"\{\s*(\d{1,9})?\s*(?:(,)\s*(\d{1,9})?\s*)?\}")
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t", **{each: each for each in '\\"[]^-'}}


class InvalidGbnf(ValueError):
    """The text is not GBNF. The message says what is wrong and where."""


@dataclass(frozen=True, slots=True)
class Characters:
    ranges: tuple[tuple[int, int], ...]  # code points, with the last one included
    negated: bool = False


@dataclass(frozen=True, slots=True)
class GbnfReference:
    name: str


@dataclass(frozen=True, slots=True)
class GbnfSequence:
    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class GbnfChoice:
    ways: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    item: Node
    least: int
    most: int | None  # None for any number


Node = Characters | GbnfReference | GbnfSequence | GbnfChoice | Repeat

ANY = Characters((), negated=True)


def gbnf_to_lark(text: str) -> str:
    """The same grammar in Lark. Raises InvalidGbnf."""
    rules = parse(text)
    try:
        return f"start: /{_Regex(rules).of(GbnfReference(ROOT))}/"
    except _NotRegular:
        pass
    # Rules get new names: Lark allows no dashes, and reads capitals as terminals.
    names = {name: f"rule{number}" for number, name in enumerate(rules)}
    lines = [f"{names[name]}: {_expression(rule, names)}" for name, rule in rules.items()]
    return "\n".join([f"start: {names[ROOT]}", *lines])


def parse(text: str) -> dict[str, Node]:
    """The rules by name. All rules that they refer to are defined. Raises InvalidGbnf."""
    return _Parser(text).rules()


class _Parser:
    """Ignores line breaks. A name followed by `::=` begins the next rule."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = self._split()
        self._at = 0
        self._depth = 0

    def _split(self) -> list[tuple[str, str, int]]:
        """Kind, text and position of each token, with an empty one at the end."""
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
        while self._tokens[self._at][0] != "end":
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

    def _begins_rule(self) -> bool:
        kinds = [kind for kind, _, _ in self._tokens[self._at : self._at + 2]]
        return kinds == ["name", "defined"]

    def _take(self, sign: str) -> bool:
        found = self._tokens[self._at][:2] == ("sign", sign)
        self._at += found
        return found

    def _choice(self) -> Node:
        ways = [self._sequence()]
        while self._take("|"):
            ways.append(self._sequence())
        return ways[0] if len(ways) == 1 else GbnfChoice(tuple(ways))

    def _sequence(self) -> Node:
        items: list[Node] = []
        while not self._begins_rule() and (item := self._item()) is not None:
            items.append(self._repeated(item))
        return items[0] if len(items) == 1 else GbnfSequence(tuple(items))

    def _item(self) -> Node | None:
        if self._take("("):
            return self._group()
        if self._take("."):
            return ANY
        kind, text, at = self._tokens[self._at]
        if kind not in ("name", "string", "chars"):
            return None
        self._at += 1
        if kind == "name":
            return GbnfReference(text)
        if kind == "chars":
            return self._class(text[1:-1], at)
        codes = [code for code, _ in self._codes(text[1:-1], at)]
        return GbnfSequence(tuple(Characters(((code, code),)) for code in codes))

    def _group(self) -> Node:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            self._fail(f"parentheses may be nested at most {MAX_DEPTH} deep")
        inner = self._choice()
        if not self._take(")"):
            self._fail("a `)` is missing")
        self._depth -= 1
        return inner

    def _repeated(self, item: Node) -> Node:
        signs: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
        while True:
            kind, text, _ = self._tokens[self._at]
            if kind == "bounds":
                item = Repeat(item, *self._bounds(text))
            elif kind == "sign" and text in signs:
                item = Repeat(item, *signs[text])
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
                self._fail(f"{found[0]} is not a character", at)
            codes.append((code, found[5] is None))
        return codes


class _NotRegular(Exception):
    """A rule contains itself, or the regular expression becomes too large."""


@dataclass(slots=True)
class _Regex:
    rules: Mapping[str, Node]
    inside: list[str] = field(default_factory=list)  # the rules that are being written
    known: dict[str, str] = field(default_factory=dict)
    depth: int = 0

    def of(self, node: Node) -> str:
        self.depth += 1
        if self.depth > MAX_REGEX_DEPTH:
            raise _NotRegular
        match node:
            case Characters():
                text = _class(node)
            case GbnfSequence(items):
                text = "".join(map(self.of, items))
            case GbnfChoice(ways):
                text = f"(?:{'|'.join(map(self.of, ways))})"
            case Repeat(item):
                text = f"(?:{self.of(item)}){_bounds(node)}"
            case GbnfReference(name):
                text = self._rule(name)
        self.depth -= 1
        if len(text) > MAX_REGEX_CHARACTERS:
            raise _NotRegular
        return text

    def _rule(self, name: str) -> str:
        if name in self.inside:
            raise _NotRegular
        if name not in self.known:
            self.inside.append(name)
            self.known[name] = self.of(self.rules[name])
            self.inside.pop()
        return self.known[name]


def _expression(node: Node, names: Mapping[str, str]) -> str:
    match node:
        case Characters():
            return f"/{_class(node)}/"
        case GbnfSequence(items):
            return f"({' '.join(_expression(each, names) for each in items)})" if items else '""'
        case GbnfChoice(ways):
            return f"({' | '.join(_expression(each, names) for each in ways)})"
        case Repeat(item):
            return f"({_expression(item, names)}){_bounds(node)}"
        case GbnfReference(name):
            return names[name]


def _class(node: Characters) -> str:
    if not node.ranges:
        return "(?s:.)"
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
    return f"{{{node.least},{'' if node.most is None else node.most}}}"
