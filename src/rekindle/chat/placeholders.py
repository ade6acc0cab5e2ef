"""Placeholders: opaque text that passes through a template and is found again in its output."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator

# Every character is private-use: no filter of case or whitespace changes a placeholder.
DIGITS = "0123456789abcdef"
PRIVATE = "".join(map(chr, range(0xF0000, 0xF0010)))
WIDTH = 8
NUMBER = re.compile(f"[{PRIVATE}]{{{WIDTH}}}")
TO_PRIVATE = str.maketrans(DIGITS, PRIVATE)
FROM_PRIVATE = str.maketrans(PRIVATE, DIGITS)


class Placeholders:
    """Numbers as opaque text; a random prefix that no user can guess sets them apart."""

    def __init__(self) -> None:
        self._prefix = secrets.token_hex(8).translate(TO_PRIVATE)

    def of(self, number: int) -> str:
        return self._prefix + f"{number:0{WIDTH}x}".translate(TO_PRIVATE)

    def split(self, text: str) -> Iterator[str | int]:
        """The text and the numbers in it, in order; a truncated placeholder is left out."""
        first, *rest = text.split(self._prefix)
        yield first
        for piece in rest:
            if number := NUMBER.match(piece):
                yield int(number[0].translate(FROM_PRIVATE), 16)
                piece = piece[WIDTH:]
            yield piece
