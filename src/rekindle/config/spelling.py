"""How a setting is written in the place it came from, and which one was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable

Spell = Callable[[str], str]  # the name of a setting, as that place writes it


def as_flag(name: str) -> str:
    return f"`--{name.replace('_', '-')}`"


def unknown_setting(name: str, known: Iterable[str], spell: Spell) -> str:
    """The sentence about a setting that does not exist."""
    close = difflib.get_close_matches(name, list(known), 1)
    hint = f"; did you mean {spell(close[0])}?" if close else ""
    return f"unknown setting {spell(name)}{hint}"
