"""Reads how a model folder makes a vector or a score of the states of its tokens.

The files are those of sentence-transformers: `modules.json` lists the steps, and each step has a
folder with a `config.json`. Nothing in them is trusted, and no class that they name is imported.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from rekindle.errors import ModelError
from rekindle.models.folder import AGAIN, MAX_JSON_BYTES, read_json

MODULES = "modules.json"
POOLING_FOLDER = "1_Pooling"
MODULE_CONFIG = "config.json"

Pooling = Literal["mean", "cls", "last"]

#: The names of the supported kinds, in the older form (a flag for each) and in the newer one.
_FLAGS: dict[str, Pooling] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
}
_NAMES: dict[str, Pooling] = {"mean": "mean", "cls": "cls", "lasttoken": "last"}


@dataclass(frozen=True, slots=True)
class OutputModules:
    """What follows the transformer of a model."""

    pooling: Pooling | None = None  # None: the folder does not say
    normalises: bool = True  # vectors have length one
    score_tokens: tuple[int, int] | None = None  # their probabilities rank: relevant, irrelevant


def read_modules(folder: Path) -> OutputModules:
    """Read the modules of a folder. Raises ModelError for one that is not supported."""
    if not (folder / MODULES).is_file():
        # A conversion may have kept the folder of the pooling only.
        has_pooling = (folder / POOLING_FOLDER / MODULE_CONFIG).is_file()
        return OutputModules(_pooling(folder, POOLING_FOLDER) if has_pooling else None)
    pooling: Pooling | None = None
    score_tokens: tuple[int, int] | None = None
    normalises = False
    for kind, path in _modules(folder):
        match kind:
            case "Transformer":
                _check_root(folder, path)
            case "Pooling":
                pooling = _pooling(folder, path)
            case "Normalize":
                normalises = True
            case "LogitScore":
                score_tokens = _score_tokens(folder, path)
            case _:
                raise ModelError(
                    f"{folder.name} has a {kind[:60]} module in {MODULES}, which is not supported: "
                    "serve a GGUF file of this model, or a model with only Transformer, Pooling "
                    "and Normalize"
                )
    return OutputModules(pooling, normalises, score_tokens)


def _modules(folder: Path) -> list[tuple[str, str]]:
    """The class name and the folder of each module, in order."""
    path = folder / MODULES
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ModelError(f"{path} is larger than {MAX_JSON_BYTES >> 20} MiB. {AGAIN}")
        found = json.loads(path.read_bytes())
        if not isinstance(found, list):
            raise TypeError
        # Numbers in order: the order in the file is not promised.
        listed = sorted(found, key=lambda each: int(each["idx"]))
        return [(str(each["type"]).rsplit(".", 1)[-1], str(each["path"])) for each in listed]
    except OSError as error:
        raise ModelError(f"Cannot read {path}: {error.strerror}. {AGAIN}") from error
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ModelError(f"{path} is not a list of modules. {AGAIN}") from None


def _check_root(folder: Path, path: str) -> None:
    if path:
        raise ModelError(
            f"{folder.name} keeps its transformer in the folder {path[:60]!r}: move the files of "
            f"that folder next to {MODULES}, and set its `path` there to an empty text"
        )


def _module_config(folder: Path, path: str) -> dict[str, Any]:
    parts = PurePosixPath(path).parts
    if len(parts) != 1 or parts[0] in ("..", "/") or "\\" in path:
        raise ModelError(f"{folder / MODULES} names the module folder {path[:60]!r}. {AGAIN}")
    return read_json(folder / path / MODULE_CONFIG)


def _pooling(folder: Path, path: str) -> Pooling:
    config = _module_config(folder, path)
    given = config.get("pooling_mode")
    if given is not None:
        names = given if isinstance(given, list) else [given]
        found = [_NAMES.get(str(name), str(name)) for name in names]
    else:
        on = [name for name, value in config.items() if name.startswith("pooling_mode_") and value]
        found = [_FLAGS.get(name, name.removeprefix("pooling_mode_")) for name in on]
    for pooling in _NAMES.values():
        if found == [pooling]:
            return pooling
    what = " and ".join(found)[:100] or "none"
    raise ModelError(
        f"the pooling of {folder.name} is {what} ({path}/{MODULE_CONFIG}), which is not supported: "
        "give a model with mean, cls or lasttoken pooling"
    )


def _score_tokens(folder: Path, path: str) -> tuple[int, int]:
    config = _module_config(folder, path)
    yes, no = config.get("true_token_id"), config.get("false_token_id")
    if type(yes) is not int or type(no) is not int:
        raise ModelError(
            f"{folder / path / MODULE_CONFIG} names no `true_token_id` and `false_token_id`. "
            f"{AGAIN}"
        )
    return yes, no
