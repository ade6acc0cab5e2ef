"""Checks that the documentation matches the source tree and keeps its form."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import rekindle

SOURCE = Path(rekindle.__file__).parent
ROOT = SOURCE.parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(
    [*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]
)
DECISIONS = sorted((DOCS / "decisions").glob("0*.md"))
#: Pages for contributors. Their lines fit into an editor window.
CONTRIBUTOR_PAGES = [
    ROOT / "CONTRIBUTING.md",
    *(DOCS / f"{name}.md" for name in ("architecture", "extending", "benchmarks")),
    *DECISIONS,
]
DECISION_PARTS = (
    "**Context.**",
    "**Choice",
    "**Rejected.**",
    "**How we would know it was wrong.**",
)
MAX_LINE = 120
MAX_FILES_ON_THE_FIRST_DAY = 40

PATH = re.compile(r"`([\w./-]+\.(?:py|c|md|yaml))`")
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
ANCHOR = re.compile(r"\]\(([^)#:]*)#([^)]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
PLACEHOLDER = re.compile(r"[A-Z]{3}|rekindle\.yaml")  # NAME.py stands for any name

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def named_files(page: Path) -> set[str]:
    found = PATH.findall(page.read_text())
    return {path for path in found if not PLACEHOLDER.search(path)}


def exists(path: str) -> bool:
    """Accept paths from the root or from src/rekindle, and bare names of any source file."""
    if "/" not in path and any(SOURCE.rglob(path)):
        return True
    return (ROOT / path).exists() or (SOURCE / path).exists()


@pages
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    assert {path for path in named_files(page) if not exists(path)} == set()


@pages
def test_every_link_leads_to_a_file(page: Path) -> None:
    links = LINK.findall(page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


@pages
def test_every_link_to_a_heading_leads_to_one(page: Path) -> None:
    links = ANCHOR.findall(page.read_text())
    wrong = [
        f"{link}#{anchor}"
        for link, anchor in links
        if anchor not in anchors(page.parent / link if link else page)
    ]
    assert wrong == []


def anchors(page: Path) -> set[str]:
    """The anchors that a code host gives to the headings of a page."""
    headings = HEADING.findall(FENCED.sub("", page.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_architecture_tells_a_request_in_at_most_twelve_numbered_steps() -> None:
    text = (DOCS / "architecture.md").read_text()
    steps = re.findall(r"^(\d+)\. ", text, re.MULTILINE)
    assert steps == [str(number) for number in range(1, len(steps) + 1)]
    assert 6 <= len(steps) <= 12


def test_architecture_names_no_more_files_than_a_reader_needs_on_the_first_day() -> None:
    assert len(named_files(DOCS / "architecture.md")) <= MAX_FILES_ON_THE_FIRST_DAY


@pytest.mark.parametrize("page", CONTRIBUTOR_PAGES, ids=lambda page: page.name)
def test_lines_of_pages_for_contributors_are_short(page: Path) -> None:
    lines = page.read_text().splitlines()
    assert [number for number, line in enumerate(lines, 1) if len(line) > MAX_LINE] == []


@pytest.mark.parametrize("page", DECISIONS, ids=lambda page: page.name)
def test_a_decision_says_why_what_else_and_when_it_would_be_wrong(page: Path) -> None:
    text = page.read_text()
    assert [part for part in DECISION_PARTS if part not in text] == []


def test_the_list_of_decisions_is_complete() -> None:
    listed = LINK.findall((DOCS / "decisions" / "README.md").read_text())
    assert listed == [page.name for page in DECISIONS]
