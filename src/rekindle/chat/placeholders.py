"""Marks that travel through a template inside the text and are found again on the other side."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator

# Every character is private-use: no filter of case or whitespace changes a sentinel.
DIGITS = "0123456789abcdef"
PRIVATE = "".join(map(chr, range(0xF0000, 0xF0010)))
WIDTH = 8
NUMBER = re.compile(f"[{PRIVATE}]{{{WIDTH}}}")
TO_PRIVATE = str.maketrans(DIGITS, PRIVATE)
FROM_PRIVATE = str.maketrans(PRIVATE, DIGITS)


class Sentinels:
    """Numbers as opaque text; a random lead keeps apart what a user wrote, whatever that is."""

    def __init__(self) -> None:
        self._lead = secrets.token_hex(8).translate(TO_PRIVATE)

    def stand_for(self, number: int) -> str:
        return self._lead + f"{number:0{WIDTH}x}".translate(TO_PRIVATE)

    def split(self, text: str) -> Iterator[str | int]:
        """The text and the numbers in it, in order; a sentinel cut short is left out."""
        first, *rest = text.split(self._lead)
        yield first
        for piece in rest:
            if number := NUMBER.match(piece):
                yield int(number[0].translate(FROM_PRIVATE), 16)
                piece = piece[WIDTH:]
            yield piece
