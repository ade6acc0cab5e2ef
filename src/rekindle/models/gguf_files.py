"""Chooses which GGUF files of a repository make up the requested model."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TypeAlias

PREFERRED = ("Q4_K_M", "Q4_K_S", "Q5_K_M", "Q4_0", "Q8_0", "F16")
#: For a model that shall fit into memory. Most quality for its size first, then smaller ones; the
#: larger ones come last, for repositories that have nothing else.
FITTING = (
    *("Q4_K_M", "Q4_K_S", "Q4_0", "MXFP4", "IQ4_XS", "Q3_K_M", "Q3_K_S", "Q2_K"),
    *("Q5_K_M", "Q6_K", "Q8_0", "F16", "BF16"),
)
PROJECTOR = "mmproj"
PROJECTOR_PRECISIONS = ("f16", "bf16", "f32", "q8_0")  # in order of preference
NOT_MODELS = (PROJECTOR, "imatrix")  # GGUF files that accompany a model
SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


#: The files of one model: one, or all files of a split in order.
Files: TypeAlias = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Unclear:
    """No single model matches. `choices` are the files that a user may name."""

    reason: str
    choices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model of a repository, with the size of all its files."""

    quant: str  # or the name of its file, if that names none
    files: Files
    size_bytes: int


def candidates(sizes: Mapping[str, int]) -> list[Candidate]:
    """Return the models of a repository by preference. `sizes` is in bytes by file name.

    A quantisation that several models have is ambiguous and left out.
    """
    models = whole_models(sizes)
    matching = ((quant, _of_quant(models, quant)) for quant in FITTING)
    found = [(quant, each[0]) for quant, each in matching if len(each) == 1]
    if not found and len(models) == 1:
        found = [(models[0][0], models[0])]
    return [Candidate(quant, files, sum(map(sizes.__getitem__, files))) for quant, files in found]


def choose(names: Collection[str], wanted: str | None) -> Files | Unclear:
    """Choose the model: `wanted` is a file, a quantisation, or None for the best."""
    if wanted is not None and wanted.endswith(".gguf"):
        return _choose_file(names, wanted)
    models = whole_models(names)
    if not models:
        return Unclear("has no complete GGUF model", ())
    if wanted is not None:
        return _only(_of_quant(models, wanted), models, f"with {wanted}")
    for quant in PREFERRED:
        if matching := _of_quant(models, quant):
            return _only(matching, models, f"with {quant}")
    return _only(models, models, "of a preferred kind")


def split_names(name: str) -> Files:
    """Return every file of the split that `name` is part of, in order, or just `name`."""
    match = SHARD.fullmatch(name)
    if match is None or not 1 <= int(match["number"]) <= int(match["count"]):
        return (name,)
    stem, count = match["stem"], match["count"]
    return tuple(f"{stem}-{number:05}-of-{count}.gguf" for number in range(1, int(count) + 1))


def projectors(names: Collection[str]) -> list[str]:
    return [name for name in names if PROJECTOR in _base(name) and _base(name).endswith(".gguf")]


def best_projector(names: Collection[str]) -> str | None:
    def rank(name: str) -> tuple[int, str]:
        words = _words(name)
        ranks = [place for place, each in enumerate(PROJECTOR_PRECISIONS) if each in words]
        return min(ranks, default=len(PROJECTOR_PRECISIONS)), name

    return min(projectors(names), key=rank, default=None)


def model_name(projector: str) -> str:
    """Return the name of the model in the file name of its projector, or an empty text."""
    return "-".join(
        word
        for word in _words(projector)
        if word not in ("", "model", PROJECTOR, *PROJECTOR_PRECISIONS)
    )


def _words(name: str) -> list[str]:
    return re.split(r"[-.]", _base(name).removesuffix(".gguf"))


def _base(name: str) -> str:
    return PurePosixPath(name).name.lower()


def _choose_file(names: Collection[str], wanted: str) -> Files | Unclear:
    exact = [name for name in names if name == wanted]
    found = exact or [name for name in names if PurePosixPath(name).name == wanted]
    sets = {split_names(name) for name in found}
    whole = [files for files in sets if set(files) <= set(names)]
    return _only(whole, whole_models(names), f"called {wanted}")


def whole_models(names: Collection[str]) -> list[Files]:
    """Return the complete models among `names`. A split with a missing file is not complete."""
    present = set(names)
    sets = dict.fromkeys(
        split_names(name)
        for name in sorted(present)
        if _base(name).endswith(".gguf") and not any(word in _base(name) for word in NOT_MODELS)
    )
    return [files for files in sets if present.issuperset(files)]


def _of_quant(models: list[Files], quant: str) -> list[Files]:
    # Whole words only: Q4_0 is not in Q4_0_4_4, and F16 is not in BF16.
    word = re.compile(rf"(?<![a-z0-9]){re.escape(quant)}(?![a-z0-9_])", re.IGNORECASE)
    return [files for files in models if word.search(files[0])]


def _only(found: list[Files], models: list[Files], what: str) -> Files | Unclear:
    if len(found) == 1:
        return found[0]
    choices = tuple(files[0] for files in found or models)
    return Unclear(f"has {'several files' if found else 'no file'} {what}", choices)
