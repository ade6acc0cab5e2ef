"""Builds a grammar in llguidance's Lark, rule by rule."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rekindle.errors import BadRequest

# Finding forced tokens costs a tokenisation per step, and one per token in a long constant.
_HEAD = '%llguidance {"no_forcing": true}\n'
MAX_CHARACTERS = 2_000_000  # of all rules
TEXT = "(?s:.*)"
BLANKS = r"(/[ \n\r\t]{1,4}/)?"
# One blank may follow a separator. A model might write other white space without end.
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}


@dataclass(frozen=True, slots=True)
class Grammar:
    """The grammar of a reply. `param` is the request field that asked for it."""

    lark: str
    param: str


class Rules:
    """Collects the rules of one grammar. Expressions are Lark and may use names of rules."""

    def __init__(self, control: Mapping[str, int], param: str, text: str = TEXT) -> None:
        self.control = control
        self._param = param
        self._characters = 0
        longest_first = sorted(control, key=len, reverse=True)
        self._markers = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._rules: list[str] = []
        self.text = self.terminal(f"/{text}/")

    def rule(self, body: str, *, lazy: bool = False) -> str:
        """Adds a rule and returns its name."""
        return self._add(f"r{len(self._rules)}", body, "[lazy]" if lazy else "")

    def recursive(self, body: Callable[[str], str]) -> str:
        """Adds a rule whose body may use the rule's own name. Returns the name."""
        index = len(self._rules)
        name = f"n{index}"
        self._rules.append("")  # reserved, because the body adds rules of its own
        self._rules[index] = f"{name}: {body(name)}"
        return name

    def terminal(self, body: str) -> str:
        """Adds a terminal, which one regular expression matches. Returns its name."""
        return self._add(f"T{len(self._rules)}", body, "")

    def _add(self, name: str, body: str, options: str) -> str:
        self._rules.append(f"{name}{options}: {body}")
        self._characters += len(body)
        if self._characters > MAX_CHARACTERS:
            raise BadRequest("The schemas are too large to be enforced.", param=self._param)
        return name

    def marker(self, text: str) -> str:
        """Text of the format itself, in which texts of control tokens mean the tokens."""
        return " ".join(self._parts(text))

    def until(self, marker: str, text: str | None = None) -> str:
        """Text up to and including the first marker."""
        first, *others = self._parts(marker)
        text = text or self.text
        if first.startswith("<"):
            return " ".join((text, first, *others))
        return " ".join((self.rule(f"{text} {first}", lazy=True), *others))

    def _parts(self, text: str) -> list[str]:
        parts, at = [], 0
        for match in self._markers.finditer(text):
            parts += [literal(text[at : match.start()])] if match.start() > at else []
            parts.append(f"<[{self.control[match[0]]}]>")
            at = match.end()
        return [*parts, literal(text[at:])] if at < len(text) else parts

    def json(self, schema: Mapping[str, Any], *, lenient: bool = False) -> str:
        return self.rule(f"%json {styled(schema, lenient=lenient)}")

    def repeated(self, expression: str, between: str, most: int) -> str:
        """The expression one to `most` times, with `between` in between."""
        one = self.rule(expression)
        if most == 1:
            return one
        return f"{one} ({self.marker(between)} {one}){{0,{most - 1}}}"

    def grammar(self, start: str) -> Grammar:
        return Grammar("\n".join((_HEAD + "start: " + start, *self._rules, "")), self._param)


def styled(schema: Mapping[str, Any], *, lenient: bool = False) -> str:
    """A schema in llguidance's form. `lenient` leaves out what cannot be enforced."""
    style = {**_JSON_STYLE, "lenient": lenient, "coerce_one_of": lenient}
    return json.dumps({**schema, "x-guidance": style})  # last, so that a schema cannot set it


def literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def either(expressions: Iterable[str]) -> str:
    return "(" + " | ".join(expressions) + ")"
