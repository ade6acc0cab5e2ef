"""Lists and removes the models that were pulled to this machine."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from rekindle.errors import ModelError
from rekindle.models.catalogue import CATALOGUE, HubModel, PackagedModel, locate
from rekindle.models.families import name_of_repo
from rekindle.models.folder import is_model_folder
from rekindle.models.gguf_files import (
    FITTING,
    Unclear,
    candidates,
    choose,
    projectors,
    whole_models,
)

CONVERTED = "converted"  # the folder of converted models, inside the models folder


@dataclass(frozen=True, slots=True)
class PulledModel:
    """A complete model. `name` is what other commands take."""

    name: str
    path: Path  # the folder, or the first file
    files: tuple[Path, ...]  # files that no other model uses
    shared: tuple[Path, ...] = ()  # files that its neighbours use, too

    @property
    def size_bytes(self) -> int:
        return sum(file.stat().st_size for file in (*self.files, *self.shared))

    @property
    def pulled_s(self) -> float:
        return max(file.stat().st_mtime for file in self.files)


def pulled_models(models_dir: Path) -> list[PulledModel]:
    """Return the complete models in this folder, by name."""
    folders = sorted(path for path in models_dir.glob("hub/*/*") if path.is_dir())
    converted = sorted((models_dir / CONVERTED).glob("*.gguf"))
    found = chain(
        _packaged(models_dir),
        *(_in_repo(folder) for folder in folders),
        (PulledModel(str(path), path, (path,)) for path in converted),
    )
    return sorted(found, key=lambda model: model.name)


def _packaged(models_dir: Path) -> Iterator[PulledModel]:
    """The models from wheels. Two names may mean the same file, which is listed once."""
    names: dict[Path, str] = {}
    for model in CATALOGUE.values():
        names.setdefault(models_dir / model.file_name, model.name)
    for path, name in names.items():
        if path.is_file():
            yield PulledModel(name, path, (path,))


def _in_repo(folder: Path) -> Iterator[PulledModel]:
    repo = f"{folder.parent.name}/{folder.name}"
    name = name_of_repo(repo)
    if is_model_folder(folder):
        inside = tuple(path for path in folder.iterdir() if path.is_file())
        yield PulledModel(name or repo, folder, inside)
        return
    paths = [path for path in folder.rglob("*.gguf") if path.is_file()]
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths}
    quants = {candidate.files: candidate.quant for candidate in candidates(sizes)}
    default = choose(sizes, None)
    shared = tuple(folder / each for each in projectors(sizes))
    for files in whole_models(sizes):
        full = name or repo
        if files != default:
            quant = quants.get(files, files[0])
            full = f"{name}-{quant.lower()}" if name and quant in FITTING else f"{repo}:{files[0]}"
        yield PulledModel(full, folder / files[0], tuple(folder / each for each in files), shared)


def find_pulled_model(name: str, models_dir: Path) -> PulledModel:
    """Return the pulled model that a name means. Raises ModelError."""
    pulled = pulled_models(models_dir)
    if exact := [model for model in pulled if model.name == name]:
        return exact[0]
    try:
        source = locate(name, models_dir)
    except ModelError:
        raise ModelError(
            f"No model on this machine is called {name!r}. `rekindle ls` lists the models that are "
            "here."
        ) from None
    match source:
        case Path() as path:
            raise ModelError(
                f"{path} is a file or folder of yours, not a pulled model. Name a model that "
                "`rekindle ls` lists."
            )
        case PackagedModel(path=path):
            found = [model for model in pulled if model.path == path]
        case HubModel():
            found = _of_source(source, pulled)
    if found:
        return found[0]
    raise ModelError(
        f"{name} is not on this machine. `rekindle pull {name}` downloads it, and `rekindle ls` "
        "lists the models that are here."
    )


def _of_source(source: HubModel, pulled: list[PulledModel]) -> list[PulledModel]:
    inside = {
        model.path.relative_to(source.folder).as_posix(): model
        for model in pulled
        if model.path.is_relative_to(source.folder)
    }
    if source.wanted is None and source.folder in (model.path for model in inside.values()):
        return list(inside.values())
    names = [path.relative_to(source.folder).as_posix() for path in source.folder.rglob("*.gguf")]
    chosen = choose(names, source.wanted)
    return [inside[chosen[0]]] if not isinstance(chosen, Unclear) else []


def remove(model: PulledModel, models_dir: Path) -> int:
    """Delete a model, and shared files that no other model needs. Returns the bytes freed."""
    others = [other for other in pulled_models(models_dir) if other.path != model.path]
    needed = {file for other in others for file in other.shared}
    gone = [*model.files, *(file for file in model.shared if file not in needed)]
    freed_bytes = sum(file.stat().st_size for file in gone)
    try:
        if model.path.is_dir():
            shutil.rmtree(model.path)
        else:
            for file in gone:
                file.unlink()
            _remove_empty(model.path.parent, models_dir)
    except OSError as error:
        raise ModelError(f"Cannot remove {model.name}: {error}") from error
    return freed_bytes


def _remove_empty(folder: Path, models_dir: Path) -> None:
    while folder.is_relative_to(models_dir / "hub") and not any(folder.iterdir()):
        folder.rmdir()
        folder = folder.parent
