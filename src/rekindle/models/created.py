"""Keeps the models that requests have created: a source, a system prompt and parameters."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from rekindle.errors import ModelError

log = logging.getLogger("rekindle.models")

FOLDER = "created"  # inside the models folder
MAX_RECORD_BYTES = 1 << 20


def read_created(models_dir: Path) -> dict[str, dict[str, Any]]:
    """Return the records by name. A damaged one is skipped with a warning."""
    found = {}
    for path in sorted((models_dir / FOLDER).glob("*.json")):
        try:
            if path.stat().st_size > MAX_RECORD_BYTES:
                raise ValueError("too large")
            record = json.loads(path.read_bytes())
            if not isinstance(record, dict) or not isinstance(record.get("from"), str):
                raise ValueError("no source")
        except (OSError, ValueError) as error:
            log.warning("skipping %s, which describes no model: %s", path, error)
        else:
            found[unquote(path.stem)] = record
    return found


def write_created(models_dir: Path, name: str, record: Mapping[str, Any]) -> None:
    """Store a record, whole or not at all. Raises ModelError."""
    path = _path(models_dir, name)
    part = path.with_suffix(".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("w", encoding="utf-8") as file:
            json.dump(record, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise ModelError(f"Cannot store {name} under {path.parent}: {error.strerror}.") from error


def remove_created(models_dir: Path, name: str) -> None:
    _path(models_dir, name).unlink(missing_ok=True)


def _path(models_dir: Path, name: str) -> Path:
    """Quote the name, so that it is one file in this folder, whatever its characters are."""
    quoted = quote(name, safe="").replace(".", "%2E")
    return models_dir / FOLDER / f"{quoted}.json"
