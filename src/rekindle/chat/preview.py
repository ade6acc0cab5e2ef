"""A few words by which a remembered conversation is recognised: its last user message's first."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass

from rekindle.chat.escaping import PICTURE, PICTURE_END, ControlTexts, unescape
from rekindle.chat.template import ChatTemplate
from rekindle.errors import TemplateFailed
from rekindle.tokens import common_length

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
