"""Presents custom tools, whose input is free text, to the model as functions.

Such a function has one text argument, `input`. The client gets only the value of this argument.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

MAX_GRAMMAR_CHARACTERS = 65_536  # of all custom tools together
INPUT = "input"  # the only argument


def custom_function(
    description: str | None, grammar: str | None, *, is_enforced: bool
) -> dict[str, Any]:
    """Describe a custom tool as templates read a function, without the name.

    A grammar that sampling enforces is a regular expression. Any other grammar is only described to
    the model, because sampling cannot enforce Lark inside JSON.
    """
    text: dict[str, Any] = {"type": "string"}
    described: dict[str, Any] = {"description": description or ""}
    if not is_enforced:
        rule = f"Its {INPUT} follows this Lark grammar:\n{grammar}"
        described["description"] = "\n\n".join(filter(None, [description, rule]))
    elif grammar is not None:
        text["pattern"] = f"^(?:{grammar})$"
        described["strict"] = True
    described["parameters"] = {
        "type": "object",
        "properties": {INPUT: text},
        "required": [INPUT],
        "additionalProperties": False,
    }
    return described


def check_grammars(grammars: Iterable[str]) -> None:
    """Limit the grammars of a request, because compiling one takes time."""
    if (found := sum(map(len, grammars))) > MAX_GRAMMAR_CHARACTERS:
        raise ValueError(
            f"may have at most {MAX_GRAMMAR_CHARACTERS} characters of `definition` in all custom "
            f"tools together, not {found}"
        )


def custom_arguments(text: str) -> str:
    """The arguments of an earlier call, as the model wrote them."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


_BEGIN = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
_SAFE = re.compile(
    r"(?:[^\"\\]"
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"  # a surrogate pair
    r"|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}"  # but not a lone surrogate
    r"|\\[\"\\/bfnrt])*"
)


class CustomInput:
    """Extracts the input of a custom tool from its arguments in JSON, as they are generated.

    Arguments that are not the expected JSON are passed on as the input, so that nothing is lost.
    """

    def __init__(self) -> None:
        self._pending = ""
        self._begun = False
        self._is_json = True
        self._is_over = False  # after the text's last quote

    def add(self, arguments: str) -> str:
        """Add arguments; return what they add to the input."""
        if self._is_over:
            return ""
        self._pending += arguments
        if not self._begun:
            self._find_begin()
        return self._text(is_last=False) if self._begun else ""

    def end(self) -> str:
        """Return the rest of the input after the last arguments."""
        self._is_json &= self._begun
        return "" if self._is_over else self._text(is_last=True)

    def _find_begin(self) -> None:
        found = _BEGIN.match(self._pending)
        if found is not None:
            self._pending, self._begun = self._pending[found.end() :], True
        elif len(self._pending) > 256:  # too long for white space and the name
            self._begun, self._is_json = True, False

    def _text(self, *, is_last: bool) -> str:
        """Decode the pending text as far as possible. Invalid JSON is kept as it is."""
        if not self._is_json:
            text, self._pending = self._pending, ""
            return text
        pending, at, pieces = self._pending, 0, list[str]()
        while not self._is_over:
            safe = _SAFE.match(pending, at)
            assert safe is not None
            pieces.append(_decoded(safe[0]))
            at = safe.end()
            self._is_over = pending.startswith('"', at)
            if self._is_over or at == len(pending):
                break
            if len(pending) - at < 12 and not is_last:  # the longest escape, a surrogate pair
                break
            pieces.append(pending[at])
            at += 1
        self._pending = pending[at:]
        return "".join(pieces)


def _decoded(piece: str) -> str:
    text: str = json.loads(f'"{piece}"', strict=False)
    return text
