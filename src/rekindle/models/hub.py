"""Fetches models from a hub: GGUF files with their projector, or a whole folder."""

from __future__ import annotations

from fnmatch import fnmatchcase
from hashlib import sha256
from pathlib import Path, PurePosixPath

from rekindle.errors import ModelError
from rekindle.models.catalogue import HubModel
from rekindle.models.folder import CONFIG, WEIGHTS, is_model_folder
from rekindle.models.hub_client import HubFile, download, explained, list_files, verify
from rekindle.models.progress import Progress, task
from rekindle.models.quant import Chosen, Unclear, best_projector, choose
from rekindle.models.workspace import publish, publish_folder, require_room, workspace

MAX_CHOICES_SHOWN = 20
FOLDER_FILES = (WEIGHTS, "*.json", "*.jinja")  # of a model that is a folder; no code among them


def find_pulled(source: HubModel) -> Path | None:
    """The model's first file, or its folder, when all of it is already here; asks nobody.

    A bare org/repo means what was pulled from it before, when that is clear.
    """
    if source.wanted is None and is_model_folder(source.folder):
        return source.folder
    names = [path.relative_to(source.folder).as_posix() for path in source.folder.rglob("*.gguf")]
    match choose(names, source.wanted):
        case Chosen(names=chosen):
            return source.folder / chosen[0]
        case Unclear():
            return None


def fetch(source: HubModel, models_dir: Path, progress: Progress) -> Path:
    """Fetch every file of the model that is not here yet; returns the path of the first, or of
    its folder.

    Its projector comes before them: where the model is, the projector is as well.
    """
    with explained(source.repo):
        listed = list_files(source.repo)
        if source.wanted is None and (files := _folder_files(listed)):
            return _fetch_folder(files, source.folder, models_dir, progress)
        files = _choose_files(source, listed)
        first = source.folder / files[0].name
        _fetch_beside(first, listed, models_dir, progress)
        for number, file in enumerate(files, 1):
            title = file.name + (f" ({number} of {len(files)})" if len(files) > 1 else "")
            _fetch_file(file, source.folder / file.name, models_dir, progress, title)
    return first


def _folder_files(listed: list[HubFile]) -> list[HubFile]:
    """The files of a model that is a folder; none where the repository has GGUF files or no such
    model."""
    names = {file.name for file in listed}
    has_weights = any(fnmatchcase(name, WEIGHTS) for name in names)
    if CONFIG not in names or not has_weights or any(name.endswith(".gguf") for name in names):
        return []
    return [
        file
        for file in listed
        if "/" not in file.name and any(fnmatchcase(file.name, kind) for kind in FOLDER_FILES)
    ]


def _fetch_folder(files: list[HubFile], final: Path, models_dir: Path, progress: Progress) -> Path:
    """All files of one commit, visible together or not at all."""
    with workspace(final, models_dir, progress) as scratch:
        if is_model_folder(final):  # another process was quicker
            return final
        folder = scratch / sha256(files[0].commit.encode()).hexdigest()[:16]
        folder.mkdir(exist_ok=True)
        missing = [file for file in files if not (folder / file.name).is_file()]
        require_room(scratch, sum(file.size_bytes or 0 for file in missing))
        for file in missing:
            part = folder / f"{file.name}.part"
            title = f"{file.name} ({files.index(file) + 1} of {len(files)})"
            with task(progress, file.size_bytes, f"Downloading {title}") as advance:
                download(file, part, advance)
            verify(file, part)
            publish(part, folder / file.name)
        publish_folder(folder, final)
    return final


def fetch_projector(
    source: HubModel, model: Path, models_dir: Path, progress: Progress
) -> Path | None:
    """Fetch the projector alone, to lie beside the model; None: the repository has none."""
    with explained(source.repo):
        return _fetch_beside(model, list_files(source.repo), models_dir, progress)


def _fetch_beside(
    model: Path, listed: list[HubFile], models_dir: Path, progress: Progress
) -> Path | None:
    files = {file.name: file for file in listed}
    name = best_projector(files.keys())
    if name is None:
        return None
    path = model.with_name(PurePosixPath(name).name)
    _fetch_file(files[name], path, models_dir, progress, name)
    return path


def _choose_files(source: HubModel, listed: list[HubFile]) -> list[HubFile]:
    files = {file.name: file for file in listed}
    match choose(files.keys(), source.wanted):
        case Chosen(names=names):
            return [files[name] for name in names]
        case Unclear() if _folder_files(listed):
            raise ModelError(f"{source.repo} is one model in a folder. Leave :{source.wanted} out.")
        case Unclear(reason=reason, choices=choices):
            raise ModelError(_unclear(source.repo, reason, choices))


def _fetch_file(
    file: HubFile, final: Path, models_dir: Path, progress: Progress, title: str
) -> None:
    with workspace(final, models_dir, progress) as folder:
        if final.is_file():  # a shard of an earlier pull, or another process was quicker
            return
        part = folder / _part_name(file)
        with task(progress, file.size_bytes, f"Downloading {title}") as advance:
            download(file, part, advance)
        verify(file, part)
        publish(part, final)


def _part_name(file: HubFile) -> str:
    # Of the content, so that other content is never appended to; hashed, as a hub chose the words.
    return sha256((file.sha256 or file.commit).encode()).hexdigest() + ".part"


def _unclear(repo: str, reason: str, choices: tuple[str, ...]) -> str:
    shown = ", ".join(choices[:MAX_CHOICES_SHOWN])
    more = f" and {len(choices) - MAX_CHOICES_SHOWN} more" if choices[MAX_CHOICES_SHOWN:] else ""
    remedy = f"Name one as {repo}:FILE, of {shown}{more}." if choices else "Choose another one."
    return f"{repo} {reason}. {remedy}"
