"""What the documentation says of the source is true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import rekindle

SOURCE = Path(rekindle.__file__).parent
ROOT = SOURCE.parent.parent
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
PATH = re.compile(r"`([\w./-]+\.(?:py|md|yaml))`")
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
PLACEHOLDER = re.compile(r"[A-Z]{3}|rekindle\.yaml")  # NAME.py stands for any name

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def exists(path: str) -> bool:
    """From the root or in the source; a name alone, anywhere in the source."""
    if "/" not in path and any(SOURCE.rglob(path)):
        return True
    return (ROOT / path).exists() or (SOURCE / path).exists()


@pages
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    named = {path for path in PATH.findall(page.read_text()) if not PLACEHOLDER.search(path)}
    assert {path for path in named if not exists(path)} == set()


@pages
def test_every_link_leads_somewhere(page: Path) -> None:
    links = LINK.findall(page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_way_of_a_request_is_told_in_at_most_twelve_steps() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    steps = re.findall(r"^(\d+)\. ", text, re.MULTILINE)
    assert steps == [str(number) for number in range(1, len(steps) + 1)]
    assert 6 <= len(steps) <= 12
