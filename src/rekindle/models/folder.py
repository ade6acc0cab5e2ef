"""Checks a model folder: config.json, weights in safetensors files, a tokenizer.

Nothing in it is trusted: sizes are bounded, and no file is executed.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from rekindle.errors import ModelError
from rekindle.models.safetensors import tensor_names

CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
GENERATION_CONFIG = "generation_config.json"
INDEX = "model.safetensors.index.json"
WEIGHTS = "model*.safetensors"
AGAIN = "Fetch the model again, into an empty folder."
MAX_JSON_BYTES = 256 << 20  # several times the largest known tokenizer.json
MAX_TEMPLATE_BYTES = 1 << 20


def is_model_folder(path: Path) -> bool:
    """Judge by file names, so that a damaged folder gets a precise error later."""
    return (path / CONFIG).is_file() and any(path.glob("*.safetensors"))


def has_vision(folder: Path) -> bool:
    """Return whether the configuration describes a vision tower."""
    path = folder / CONFIG
    return path.is_file() and bool(read_json(path).get("vision_config"))


def read_json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ModelError(f"{path} is larger than {MAX_JSON_BYTES >> 20} MiB. {AGAIN}")
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"Cannot read {path}: {error.strerror}. {AGAIN}") from error
    except (ValueError, RecursionError):
        raise ModelError(f"{path} is not JSON, so it is damaged. {AGAIN}") from None
    if not isinstance(found, dict):
        raise ModelError(f"{path} has no settings. {AGAIN}")
    return found


def weight_files(folder: Path) -> list[Path]:
    """Return all weight files in order; raises ModelError if there are none, or if one of the index
    is missing.

    Files that are not in the index count too, because loaders read them.
    """
    found = sorted(folder.glob(WEIGHTS))
    if not found:
        raise ModelError(f"{folder} has no {WEIGHTS}. {AGAIN}")
    index = folder / INDEX
    named = _shards(index) if index.is_file() else set()
    missing = sorted(named - {path.name for path in found})
    if missing:
        raise ModelError(
            f"{folder} lacks {', '.join(missing[:3])}: {len(missing)} of {len(named)} files of "
            f"weights are missing. {AGAIN}"
        )
    return found


def _shards(index: Path) -> set[str]:
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise ModelError(f"{index} names no weights. {AGAIN}")
    return set(map(str, names.values()))


def check_folder(folder: Path) -> list[str]:
    """Return the names of all tensors of a complete folder; raises ModelError."""
    read_json(folder / CONFIG)
    names = [name for path in weight_files(folder) for name in tensor_names(path)]
    name, times = Counter(names).most_common(1)[0] if names else ("any tensor", 0)
    if times != 1:
        raise ModelError(
            f"{folder} has {name} {times} times: its weight files are empty, or belong to several "
            f"models. {AGAIN}"
        )
    return names


def read_chat_template(folder: Path) -> str | None:
    """Read the chat template, if any, from the places where transformers looks, in its order."""
    alone = folder / "chat_template.jinja"
    if alone.is_file():
        return _bounded(alone)
    for name in ("chat_template.json", TOKENIZER_CONFIG):
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
    if not isinstance(template, list):
        return template if isinstance(template, str) else None
    named = {
        each["name"]: each["template"]
        for each in template
        if isinstance(each, dict) and isinstance(each.get("template"), str) and "name" in each
    }
    chosen = (named[name] for name in ("default", "tool_use", *named) if name in named)
    return next(chosen, None)
