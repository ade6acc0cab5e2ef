"""A few words by which a remembered conversation is recognised: its last user message's first."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass

from rekindle.chat.escaping import CHARACTER_BYTES, PICTURE, PICTURE_END, ControlTexts, unescape
from rekindle.chat.template import ChatTemplate
from rekindle.errors import TemplateFailed
from rekindle.tokens import common_bytes, common_length

MOST_CHARACTERS = 60
PICTURES = re.compile(PICTURE + b"[^" + PICTURE_END + b"]*(?:" + PICTURE_END + b"|$)")
MOST_BYTES = 1024  # that are looked at: blanks are left out
FIRST, REPLY, LAST = "needle one", "needle two", "needle three"
PROBE = [
    {"role": "user", "content": FIRST},
    {"role": "assistant", "content": REPLY},
    {"role": "user", "content": LAST},
]


@dataclass(frozen=True, slots=True)
class Enclosure:
    """What a template writes before and after every message of a user."""

    before: bytes
    after: bytes


class Preview:
    """Finds the message in the rendered text by what the template writes around it. That a user
    wrote the same is no matter: in escaped bytes a user's control tokens look different."""

    def __init__(self, template: ChatTemplate | None, control_texts: Iterable[str]) -> None:
        self._template = template
        self._control = ControlTexts(control_texts)

    def of(self, escaped: bytes) -> str:
        """The first words of the last user message; where none is found, of the whole text."""
        around = self._enclosure
        at = escaped.rfind(around.before) if around.before else -1
        if at < 0:
            return self._words(escaped[:MOST_BYTES])
        start = at + len(around.before)
        end = escaped.find(around.after, start) if around.after else -1
        return self._words(
            escaped[start : min(start + MOST_BYTES, end if end >= 0 else len(escaped))]
        )

    def _words(self, escaped: bytes) -> str:
        shown = PICTURES.sub(b"[image] ", escaped)
        text = unescape(shown).decode(errors="ignore")
        plain = "".join(span.text for span in self._control.split(text) if not span.literal)
        words = " ".join(plain.split())
        is_whole = len(words) <= MOST_CHARACTERS
        return words if is_whole else words[: MOST_CHARACTERS - 1].rstrip() + "…"

    @functools.cached_property
    def _enclosure(self) -> Enclosure:
        try:
            text = (
                self._template.render(PROBE, add_generation_prompt=False) if self._template else ""
            )
        except TemplateFailed:
            text = ""
        before_first, found_first, rest = text.partition(FIRST)
        between, found_last, after_last = rest.partition(LAST)
        if not (found_first and found_last):
            return Enclosure(b"", b"")
        shared = common_length(before_first[::-1], between[::-1])
        before = between[len(between) - shared :]
        after = between[: common_length(between, after_last)]
        return Enclosure(before.encode(), after.encode())


# ----------------------------------------------------------------------
# The first difference of two prompts, in words for a person.

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
