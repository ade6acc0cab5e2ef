"""A model's projector: the GGUF file that turns pictures into what the model reads."""

from __future__ import annotations

from pathlib import Path

from rekindle.errors import ModelError
from rekindle.models.catalogue import CATALOGUE, HubModel, locate
from rekindle.models.gguf import check_gguf
from rekindle.models.progress import Progress
from rekindle.models.quant import best_projector, model_name, projectors, whole_models

PACKAGED = Path(__file__).parent / "data"


def find_projector(
    name: str, path: Path, *, models_dir: Path, progress: Progress, required: bool = False
) -> Path | None:
    """The checked projector of the model `name`, whose first file is at `path`; None: it has none.

    `required` asks the hub again for what an earlier pull left out, and raises ModelError where
    there is none at all.
    """
    found = _find(name, path, models_dir, progress, required=required)
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


def _find(
    name: str, path: Path, models_dir: Path, progress: Progress, *, required: bool
) -> Path | None:
    if name in CATALOGUE:
        return packaged_projector(name)
    source = locate(name, models_dir)
    found = _beside(path, of_any=required or isinstance(source, HubModel))
    if found is None and required and isinstance(source, HubModel):
        from rekindle.models import hub  # slow to import, and most starts do without it

        return hub.fetch_projector(source, path, models_dir, progress)
    return found


def _beside(path: Path, *, of_any: bool) -> Path | None:
    """In the model's folder: one that has the model's name in its own, or one that can be meant
    because no other model is there. `of_any`: whatever else is there."""
    names = [each.name for each in path.parent.glob("*.gguf") if each.is_file()]
    found = projectors(names)
    named = [each for each in found if model_name(each) and model_name(each) in path.name.lower()]
    if not named and not of_any and len(whole_models(names)) != 1:
        return None
    best = best_projector(named or found)
    return path.with_name(best) if best else None
