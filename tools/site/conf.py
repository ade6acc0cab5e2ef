"""Builds the documentation site from the same Markdown files that a code host shows.

The source folder is the root of the repository, so that links between pages stay as they are.
`make docs` runs `sphinx-build`, which treats every warning as an error: a link to a page or heading
that does not exist ends the build.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FOLDER_LINK = re.compile(r"(?<=\]\()([\w./-]+)(?=\))")
REDIRECT = '<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url={}">\n'
#: The navigation. All other pages of docs/ are for users and come first.
CONTENTS = {
    "Reference": ["docs/settings", "docs/api", "docs/python", "docs/metrics", "docs/errors"],
    "Operate": ["docs/operate", "SECURITY", "deploy/README"],
    "Contribute": [
        *("CONTRIBUTING", "docs/architecture", "docs/extending", "docs/benchmarks"),
        *("docs/decisions/README", "GPU benchmarks </benchmarks/gpu/README>", "CHANGELOG"),
    ],
}

project = "Rekindle"
extensions = ["myst_parser"]
root_doc = "README"
include_patterns = [
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "deploy/*.md",
    "CHANGELOG.md",
    "docs/**",
    "benchmarks/gpu/*.md",
]
exclude_patterns = [".*", "build", "dist", "src", "tests", "tools", "node_modules"]
myst_heading_anchors = 4  # the anchors that a code host gives to headings
suppress_warnings = ["misc.highlighting_failure"]  # snippets have ellipses

html_theme = "alabaster"  # it comes with Sphinx and loads nothing from other hosts
html_theme_options = {
    "description": "Keeps and reuses the KV cache of every conversation",
    "page_width": "75rem",
    "body_max_width": "none",
    "show_powered_by": False,
}
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_show_sphinx = html_show_copyright = html_show_sourcelink = html_use_index = False


def setup(app: Any) -> None:
    app.connect("source-read", _on_read)
    app.connect("build-finished", _on_finished)


def _on_read(app: Any, page: str, source: list[str]) -> None:
    """Let a link to a folder lead to its README, as a code host does."""
    folder = (ROOT / page).parent

    def to_readme(link: re.Match[str]) -> str:
        readme = folder / link[1] / "README.md"
        return f"{link[1].rstrip('/')}/README.md" if readme.exists() else link[1]

    source[0] = FOLDER_LINK.sub(to_readme, source[0])
    if page == root_doc:
        source[0] += "\n\n".join(["", *_contents()])
    elif page == "docs/decisions/README":
        source[0] += "\n\n" + _toctree("", ["0*"])


def _contents() -> list[str]:
    """The tables of contents behind the navigation."""
    listed = {name for names in CONTENTS.values() for name in names}
    pages = sorted(f"docs/{page.stem}" for page in (ROOT / "docs").glob("*.md"))
    use = [name for name in pages if name not in listed]
    return [_toctree(title, names) for title, names in {"Use": use, **CONTENTS}.items()]


def _toctree(title: str, names: list[str]) -> str:
    options = [":hidden:", ":glob:", *([f":caption: {title}"] if title else [])]
    return "\n".join(["```{toctree}", *options, "", *names, "```"])


def _on_finished(app: Any, error: Exception | None) -> None:
    if error is None and app.builder.name == "html":
        (Path(app.outdir) / "index.html").write_text(REDIRECT.format(f"{root_doc}.html"))
