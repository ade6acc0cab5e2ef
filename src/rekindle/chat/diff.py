"""The first difference of two prompts, in words for a person."""

from __future__ import annotations

import re

from rekindle.chat.escaping import CHARACTER_BYTES, unescape
from rekindle.tokens import common_bytes

WORDS = 8
CHARACTERS = 80
BACK_CHARACTERS = 24  # to the beginning of a word; some scripts put no space between words
FIRST_WORDS = re.compile(rf"(?:\s*\S+){{0,{WORDS}}}\s*")
WORD_START = re.compile(r"\S*\Z")


def first_difference(stored: bytes, sent: bytes) -> tuple[str, str]:
    """The first words that differ in two escaped texts; "" where a side has none left.

    A control token and the same text as content differ, though they look the same here.
    """
    at = common_bytes(stored, sent)
    word = _word_before(stored, at)
    if _ends_between_words(stored, sent, at):
        word = ""
    one, other = (_words(side, at, word) for side in (stored, sent))
    if one.strip() != other.strip():  # blanks are shown only when they are the difference
        return one.strip(), other.strip()
    return one, other


def _ends_between_words(stored: bytes, sent: bytes, at: int) -> bool:
    """Whether one side is the beginning of the other and the next word is a new one."""
    longer = max(stored, sent, key=len)
    return at == min(len(stored), len(sent)) and not longer[at : at + 1].strip()


def _word_before(text: bytes, at: int) -> str:
    """What both sides share of the word at `at`."""
    shared = text[max(0, at - CHARACTER_BYTES * (BACK_CHARACTERS + 1)) : at]
    match = WORD_START.search(unescape(shared).decode(errors="ignore"))
    word = match[0] if match else ""
    return word if len(word) <= BACK_CHARACTERS else "…" + word[-BACK_CHARACTERS:]


def _words(text: bytes, at: int, word: str) -> str:
    """Some words of a side; `word` is the shared beginning of the first."""
    while at > 0 and text[at : at + 1] and text[at] & 0xC0 == 0x80:
        at -= 1  # to the beginning of a character
    rest = unescape(text[at : at + CHARACTER_BYTES * 2 * CHARACTERS]).decode(errors="ignore")
    whole = word + rest
    shown = _first_words(whole)[:CHARACTERS]
    return shown if not whole[len(shown) :].strip() else shown.rstrip() + "…"


def _first_words(text: str) -> str:
    match = FIRST_WORDS.match(text)
    return match[0] if match else ""
