"""Lists the generated pages, and writes those that have changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from tools.reference import api, errors, metrics, python_api, settings

DOCS = Path(__file__).parents[2] / "docs"
PAGES: Mapping[str, Callable[[], str]] = {
    "settings.md": settings.render,
    "api.md": api.render,
    "python.md": python_api.render,
    "metrics.md": metrics.render,
    "errors.md": errors.render,
}


def write_all() -> None:
    for name, render in PAGES.items():
        path, content = DOCS / name, render()
        if not path.exists() or path.read_text(encoding="utf-8") != content:
            path.write_text(content, encoding="utf-8")
            print(f"wrote docs/{name}")


if __name__ == "__main__":
    write_all()
