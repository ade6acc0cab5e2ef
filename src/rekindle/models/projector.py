"""A model's projector: the GGUF file that turns pictures into what the model reads."""

from __future__ import annotations

from pathlib import Path

from rekindle.errors import ModelError
from rekindle.models.catalogue import CATALOGUE
from rekindle.models.gguf import check_gguf
from rekindle.models.quant import NOT_MODELS, SHARD

PACKAGED = Path(__file__).parent / "data"
MARK = "mmproj"  # in the names of projectors
PREFERRED = ("f16", "bf16", "f32", "q8_0")  # where a model has several


def find_projector(name: str, path: Path, *, required: bool = False) -> Path | None:
    """The checked projector of the model `name`, whose file is at `path`; None: it has none.

    `required` also takes the only projector of a folder with several models in it, and raises
    ModelError where there is none.
    """
    found = packaged_projector(name) or _beside(path, of_any=required)
    if found is not None:
        check_gguf(found)
    elif required:
        raise ModelError(
            f"{name} has no projector beside it, so it cannot see pictures. Give its file with "
            "--mmproj, or leave --vlm out."
        )
    return found


def packaged_projector(name: str) -> Path | None:
    """The one that this package holds for a model of the catalogue."""
    model = CATALOGUE.get(name)
    return PACKAGED / model.projector if model and model.projector else None


def _beside(path: Path, *, of_any: bool) -> Path | None:
    """In the model's folder: one that has the model's name, or that no other model can mean."""
    files = [each for each in path.parent.glob("*.gguf") if each.is_file()]
    projectors = [each for each in files if MARK in each.name.lower()]
    named = [each for each in projectors if _stem(each) and _stem(each) in path.stem.lower()]
    if named or of_any or _only_model(path, files):
        return best(named or projectors)
    return None


def best(projectors: list[Path]) -> Path | None:
    """Of several files of one projector, the precision that is preferred."""
    return min(projectors, key=_rank, default=None)


def _rank(path: Path) -> tuple[int, str]:
    name = path.name.lower()
    ranks = [place for place, precision in enumerate(PREFERRED) if f"-{precision}." in name]
    return min(ranks, default=len(PREFERRED)), name


def _stem(path: Path) -> str:
    """The model's name in the name of a projector; empty where it has none."""
    words = path.stem.lower().replace(MARK, "").split("-")
    return "-".join(word for word in words if word and word not in PREFERRED)


def _only_model(path: Path, files: list[Path]) -> bool:
    models = [each for each in files if not any(word in each.name.lower() for word in NOT_MODELS)]
    return {_family(each) for each in models} == {_family(path)}


def _family(path: Path) -> str:
    """What the files of a split have in common."""
    shard = SHARD.fullmatch(path.name)
    return shard["stem"] if shard else path.name
