"""The documentation site builds from the pages, with checked links and without a network."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOADED = re.compile(r"""<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=["'](https?:)?//""")


def build(root: Path, target: Path) -> subprocess.CompletedProcess[str]:
    """Run the command of `make docs`."""
    flags = [
        "-q",
        "-W",
        "--keep-going",
        "-c",
        str(ROOT / "tools/site"),
        "-d",
        str(target / "trees"),
    ]
    command = [sys.executable, "-m", "sphinx", *flags, str(root), str(target / "site")]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    built = build(ROOT, target)
    assert built.returncode == 0, built.stderr
    return target / "site"


def test_every_page_is_built_and_the_index_leads_to_the_readme(site: Path) -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    built = [(site / page.relative_to(ROOT)).with_suffix(".html") for page in pages]
    assert [page for page in built if not page.exists()] == []
    assert 'url=README.html"' in (site / "index.html").read_text()


def test_the_site_loads_nothing_from_other_hosts(site: Path) -> None:
    found = [page for page in site.rglob("*.html") if LOADED.search(page.read_text())]
    assert found == []
    styles = "".join(style.read_text() for style in site.rglob("*.css"))
    assert not re.search(r"url\(\s*['\"]?(https?:)?//|@import\s+['\"]?(https?:)?//", styles)


def test_a_link_to_a_page_or_heading_that_does_not_exist_ends_the_build(tmp_path: Path) -> None:
    root = tmp_path / "source"
    (root / "docs").mkdir(parents=True)
    (root / "docs" / "page.md").write_text("# Page\n")
    (root / "README.md").write_text(
        "# Readme\n\n[a](docs/page.md#nothing) [b](docs/nowhere.md) [c](#nothing-here)\n"
    )
    built = build(root, tmp_path)
    assert built.returncode != 0
    for target in ("'nothing'", "'docs/nowhere.md'", "'nothing-here'"):
        assert target in built.stderr
