"""Describes prompts for people: a preview of a conversation, and the difference of two prompts."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable

from rekindle.chat.escaping import CHARACTER_BYTES, PICTURE, PICTURE_END, ControlTexts, unescape
from rekindle.chat.prompt import is_character_boundary
from rekindle.chat.template import ChatTemplate
from rekindle.errors import TemplateFailed
from rekindle.tokens import common_bytes, common_length

MAX_PREVIEW_CHARACTERS = 60
MAX_PREVIEW_BYTES = 1024  # bytes that are read for a preview, which leaves out repeated blanks
FIRST, LAST = "needle one", "needle three"
PROBE = [
    {"role": "user", "content": FIRST},
    {"role": "assistant", "content": "needle two"},
    {"role": "user", "content": LAST},
]
PICTURES = re.compile(PICTURE + b"[^" + PICTURE_END + b"]*(?:" + PICTURE_END + b"|$)")

MAX_DIFFERENCE_CHARACTERS = 80
MAX_SHARED_CHARACTERS = 24  # of the word in which two prompts differ. Some scripts have no spaces
FIRST_WORDS = re.compile(r"(?:\s*\S+){0,8}\s*")
WORD_START = re.compile(r"\S*\Z")


class Preview:
    """Shows the first words of a conversation's last user message.

    It finds the message by the text that the template writes around user messages. Escaped bytes
    mark control tokens that a user wrote, so a user cannot imitate that text.
    """

    def __init__(self, template: ChatTemplate | None, control_texts: Iterable[str]) -> None:
        self._template = template
        self._control = ControlTexts(control_texts)

    def of(self, escaped: bytes) -> str:
        """The first words of the last user message, or of the whole text if none is found."""
        before, after = self._enclosure
        at = escaped.rfind(before) if before else -1
        if at < 0:
            return self._words(escaped[:MAX_PREVIEW_BYTES])
        start = at + len(before)
        end = escaped.find(after, start) if after else -1
        stop = min(start + MAX_PREVIEW_BYTES, end if end >= 0 else len(escaped))
        return self._words(escaped[start:stop])

    def _words(self, escaped: bytes) -> str:
        shown = PICTURES.sub(b"[image] ", escaped)
        text = unescape(shown).decode(errors="ignore")
        plain = "".join(span.text for span in self._control.split(text) if not span.literal)
        words = " ".join(plain.split())
        is_whole = len(words) <= MAX_PREVIEW_CHARACTERS
        return words if is_whole else words[: MAX_PREVIEW_CHARACTERS - 1].rstrip() + "…"

    @functools.cached_property
    def _enclosure(self) -> tuple[bytes, bytes]:
        """The text that the template writes before and after every user message."""
        try:
            text = (
                self._template.render(PROBE, add_generation_prompt=False) if self._template else ""
            )
        except TemplateFailed:
            text = ""
        before_first, found_first, rest = text.partition(FIRST)
        between, found_last, after_last = rest.partition(LAST)
        if not (found_first and found_last):
            return b"", b""
        shared = common_length(before_first[::-1], between[::-1])
        before = between[len(between) - shared :]
        after = between[: common_length(between, after_last)]
        return before.encode(), after.encode()


def first_difference(stored: bytes, sent: bytes) -> tuple[str, str]:
    """The first words that differ in two escaped texts, or "" for a side that has ended.

    A control token and the same text as content differ, but look the same here.
    """
    at = common_bytes(stored, sent)
    word = _word_before(stored, at)
    next_byte = max(stored, sent, key=len)[at : at + 1]
    if at == min(len(stored), len(sent)) and not next_byte.strip():  # one is the other's prefix
        word = ""
    one, other = (_words(side, at, word) for side in (stored, sent))
    if one.strip() != other.strip():  # blanks are shown only if they are the difference
        return one.strip(), other.strip()
    return one, other


def _word_before(text: bytes, at: int) -> str:
    shared = text[max(0, at - CHARACTER_BYTES * (MAX_SHARED_CHARACTERS + 1)) : at]
    match = WORD_START.search(unescape(shared).decode(errors="ignore"))
    word = match[0] if match else ""
    return word if len(word) <= MAX_SHARED_CHARACTERS else "…" + word[-MAX_SHARED_CHARACTERS:]


def _words(text: bytes, at: int, word: str) -> str:
    """The first words from `at` on. `word` is the beginning of the first one."""
    while at > 0 and not is_character_boundary(text, at):
        at -= 1
    read_bytes = CHARACTER_BYTES * 2 * MAX_DIFFERENCE_CHARACTERS
    whole = word + unescape(text[at : at + read_bytes]).decode(errors="ignore")
    match = FIRST_WORDS.match(whole)
    shown = match[0][:MAX_DIFFERENCE_CHARACTERS] if match else ""
    return shown if not whole[len(shown) :].strip() else shown.rstrip() + "…"
