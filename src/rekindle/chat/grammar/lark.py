"""Building a grammar in llguidance's Lark, rule by rule."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rekindle.errors import BadRequest

# No forced tokens: finding them costs a tokenisation per step, and in a long constant another one
# for every token.
_HEAD = '%llguidance {"no_forcing": true}\n'
TEXT = "(?s:.*)"
MOST_CHARACTERS = 2_000_000  # of all rules
_BLANKS = r"/[ \n\r\t]{1,4}/"
#: One blank may follow a separator; of other white space a model might write without end.
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a reply has to match; `param` is the field of the request that requires it."""

    lark: str
    param: str


class Rules:
    """The rules of one grammar. Expressions are strings of Lark that may use their names."""

    def __init__(self, control: Mapping[str, int], param: str, text: str = TEXT) -> None:
        self.control = control
        self._param = param
        self._characters = 0
        self._markers = re.compile("|".join(map(re.escape, _longest_first(control))) or r"(?!)")
        self._rules: list[str] = []
        self.text = self.terminal(f"/{text}/")

    def rule(self, body: str, *, lazy: bool = False) -> str:
        """Add a rule; its name."""
        return self._add(f"r{len(self._rules)}", body, "[lazy]" if lazy else "")

    def recursive(self, body: Callable[[str], str]) -> str:
        """Add a rule whose body may use its own name; its name."""
        name = f"n{len(self._rules)}"
        self._rules.append("")  # reserved: the body adds rules of its own
        place = len(self._rules) - 1
        self._rules[place] = f"{name}: {body(name)}"
        return name

    def terminal(self, body: str) -> str:
        """Add a terminal, which is matched by one regular expression; its name."""
        return self._add(f"T{len(self._rules)}", body, "")

    def _add(self, name: str, body: str, options: str) -> str:
        self._rules.append(f"{name}{options}: {body}")
        self._characters += len(body)
        if self._characters > MOST_CHARACTERS:
            raise BadRequest("The schemas are too large to be enforced.", param=self._param)
        return name

    def marker(self, text: str) -> str:
        """A text of the format itself: control tokens in it are tokens, not their text."""
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
        """The expression once up to `most` times, with `between` in between."""
        one = self.rule(expression)
        if most == 1:
            return one
        return f"{one} ({self.marker(between)} {one}){{0,{most - 1}}}"

    def grammar(self, start: str) -> Grammar:
        return Grammar("\n".join((_HEAD + "start: " + start, *self._rules, "")), self._param)


def styled(schema: Mapping[str, Any], *, lenient: bool = False) -> str:
    """A schema in the form llguidance takes; `lenient` leaves out what cannot be enforced."""
    # Last, so that a schema cannot set it.
    style = {**_JSON_STYLE, "lenient": lenient, "coerce_one_of": lenient}
    return json.dumps({**schema, "x-guidance": style})


def json_grammar(schema: Mapping[str, Any], param: str) -> Grammar:
    """JSON that a schema describes, and nothing else."""
    return Grammar(f"{_HEAD}start: %json {styled(schema)}\n", param)


def literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def either(expressions: Iterable[str]) -> str:
    return "(" + " | ".join(expressions) + ")"


def blanks() -> str:
    """A few characters of white space, or none."""
    return f"({_BLANKS})?"


def _longest_first(texts: Iterable[str]) -> list[str]:
    return sorted(texts, key=len, reverse=True)
