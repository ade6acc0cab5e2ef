"""The chat template of a model folder, wherever its publisher put it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rekindle.errors import ModelError
from rekindle.models.folder import read_json

MAX_TEMPLATE_BYTES = 1 << 20
PREFERRED = ("default", "tool_use")  # of several templates, by name


def read_chat_template(folder: Path) -> str | None:
    """In the order in which transformers looks; None: the model has none."""
    alone = folder / "chat_template.jinja"
    if alone.is_file():
        return _bounded(alone)
    for name in ("chat_template.json", "tokenizer_config.json"):
        path = folder / name
        found = _chosen(read_json(path).get("chat_template")) if path.is_file() else None
        if found is not None:
            return found
    return None


def _bounded(path: Path) -> str:
    if path.stat().st_size > MAX_TEMPLATE_BYTES:
        raise ModelError(f"{path} is larger than any chat template. Pull the model again.")
    return path.read_text(encoding="utf-8", errors="replace")


def _chosen(template: Any) -> str | None:
    """The template itself, or one of those that have names."""
    if not isinstance(template, list):
        return template if isinstance(template, str) else None
    named = {
        each["name"]: each["template"]
        for each in template
        if isinstance(each, dict) and isinstance(each.get("template"), str) and "name" in each
    }
    chosen = (named[name] for name in (*PREFERRED, *named) if name in named)
    return next(chosen, None)
