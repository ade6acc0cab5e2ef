"""The input of a custom tool: one text, which the model writes as an argument in JSON."""

from __future__ import annotations

import json
import re

from rekindle.api.responses.tools import INPUT

MOST_BEFORE = 256  # characters before the text begins; beyond, it is none
_BEGIN = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
_SAFE = re.compile(
    r"(?:[^\"\\]"
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"  # two halves of a character
    r"|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}"  # half a character alone is none
    r"|\\[\"\\/bfnrt])*"
)
_LONGEST_ESCAPE = 12  # what is longer, and not safe, is no JSON


class CustomInput:
    """Takes the pieces of the arguments; gives the pieces of the text. What is not such an argument
    is the text itself: nothing that a model wrote is lost."""

    def __init__(self) -> None:
        self._pending = ""
        self._begun = False
        self._is_json = True
        self._is_over = False  # behind the text's last quote

    def add(self, arguments: str) -> str:
        """What these add to the text."""
        if self._is_over:
            return ""
        self._pending += arguments
        if not self._begun:
            self._find_begin()
        return self._text(is_last=False) if self._begun else ""

    def end(self) -> str:
        """What is left when no more comes."""
        self._is_json &= self._begun
        return "" if self._is_over else self._text(is_last=True)

    def _find_begin(self) -> None:
        found = _BEGIN.match(self._pending)
        if found is not None:
            self._pending, self._begun = self._pending[found.end() :], True
        elif len(self._pending) > MOST_BEFORE:
            self._begun, self._is_json = True, False

    def _text(self, *, is_last: bool) -> str:
        """As much as can be told; what is no JSON is taken as it is."""
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
            if len(pending) - at < _LONGEST_ESCAPE and not is_last:
                break
            pieces.append(pending[at])
            at += 1
        self._pending = pending[at:]
        return "".join(pieces)


def _decoded(piece: str) -> str:
    text: str = json.loads(f'"{piece}"', strict=False)
    return text
