"""Where a model comes from, read off the name a person gave it."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TypeAlias

from rekindle.errors import ModelError
from rekindle.models.catalogue import CATALOGUE, CatalogueModel

HUB_ID = re.compile(
    r"(?P<owner>\w[\w.-]{0,95})/(?P<repo>\w[\w.-]{0,95})(?::(?P<wanted>\w[\w./+-]{0,199}))?",
    re.ASCII,
)
ACCEPTED = (
    f"a catalogue name ({', '.join(CATALOGUE)}), the path of a .gguf file, "
    "or a hub id (org/repo, org/repo:Q4_K_M or org/repo:file.gguf)"
)


@dataclass(frozen=True, slots=True)
class PackagedModel:
    model: CatalogueModel
    path: Path


@dataclass(frozen=True, slots=True)
class HubModel:
    """A hub repository; `wanted` is a quantisation, a file name, or None for the best."""

    repo: str
    wanted: str | None
    folder: Path


@dataclass(frozen=True, slots=True)
class LocalModel:
    path: Path


ModelSource: TypeAlias = PackagedModel | HubModel | LocalModel


def locate(name: str, models_dir: Path) -> ModelSource:
    """Say where `name` comes from and where it is kept, or raise ModelError; fetches nothing."""
    if model := CATALOGUE.get(name):
        return PackagedModel(model, models_dir / model.file_name)
    path = _expand(name)
    if _is_file(path):
        return LocalModel(path)
    if _looks_like_path(name):
        raise ModelError(_missing_file(path))
    if hub := HUB_ID.fullmatch(name):
        folder = models_dir / "hub" / hub["owner"] / hub["repo"]
        return HubModel(f"{hub['owner']}/{hub['repo']}", hub["wanted"], folder)
    raise ModelError(_unknown_name(name))


def _expand(name: str) -> Path:
    with suppress(RuntimeError):  # ~somebody without a home folder
        return Path(name).expanduser()
    return Path(name)


def _is_file(path: Path) -> bool:
    with suppress(OSError, ValueError):  # too long, not permitted, a NUL inside
        return path.is_file()
    return False


def _looks_like_path(name: str) -> bool:
    if name.startswith(("/", "./", "../", "~")) or "\\" in name:
        return True
    return name.lower().endswith(".gguf") and ":" not in name


def _missing_file(path: Path) -> str:
    with suppress(OSError, ValueError):
        if path.is_dir():
            return f"{path} is a folder. Give the path of the .gguf file inside it."
    return f"There is no model file at {path}. Check the path, or give {ACCEPTED}."


def _unknown_name(name: str) -> str:
    close = get_close_matches(name.lower(), CATALOGUE, n=3, cutoff=0.6)
    hint = f" Did you mean {' or '.join(close)}?" if close else ""
    return f"No model is called {name!r}.{hint} Give {ACCEPTED}."
