"""Fills the templates of generated pages, and writes Markdown tables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

TEMPLATES = Path(__file__).parent / "templates"
NOTE = "<!-- `make docs` writes this page from tools/reference and from the code it describes. -->"
PLACE = re.compile(r"\[\[(\w+)\]\]")


def fill(name: str, **parts: str) -> str:
    """Put the parts into the places of a template that have their names, such as [[settings]]."""
    text = (TEMPLATES / name).read_text(encoding="utf-8")
    if missing := parts.keys() ^ set(PLACE.findall(text)):
        raise ValueError(f"{name} and its parts disagree about {', '.join(sorted(missing))}")
    heading, _, rest = text.partition("\n")
    return f"{heading}\n\n{NOTE}\n{PLACE.sub(lambda place: parts[place[1]], rest)}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(text: str) -> str:
    """Escape what would end the cell."""
    return " ".join(text.split()).replace("|", "\\|")


def code(text: object) -> str:
    return f"`{text}`"


def sentence(text: str) -> str:
    """End a text with a full stop."""
    return text if text.endswith((".", "…", "!")) else f"{text}."
