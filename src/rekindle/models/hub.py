"""Fetches models from a hub: GGUF files with their projector, or a whole folder.

Uses huggingface_hub, and obeys HF_ENDPOINT and HF_TOKEN.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from fnmatch import fnmatchcase
from hashlib import file_digest, sha256
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import httpx2  # the HTTP client of huggingface_hub, whose errors it passes on
import msgspec
from huggingface_hub import HfApi, hf_hub_url
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from huggingface_hub.file_download import http_get
from huggingface_hub.hf_api import RepoSibling
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # documented there
from msgspec import Struct
from rich.filesize import decimal

from rekindle.errors import ModelError
from rekindle.memory import host_free_bytes
from rekindle.models.catalogue import HubModel
from rekindle.models.families import smaller_names
from rekindle.models.folder import CONFIG, WEIGHTS, is_model_folder
from rekindle.models.gguf_files import Candidate, Unclear, best_projector, candidates, choose
from rekindle.models.progress import Advance, Progress, task
from rekindle.models.workspace import publish, publish_folder, require_room, workspace

MAX_CHOICES_SHOWN = 20
FOLDER_FILES = (WEIGHTS, "*.json", "*.jinja")  # of a model folder; code is never fetched
MODULE_FILE = re.compile(r"\d+_\w+/config\.json")  # how sentence-transformers pools, for example


class HubFile(Struct, frozen=True, array_like=True):
    """One file at one commit. A hub knows the hash of large files only."""

    repo: str
    commit: str
    name: str
    size_bytes: int | None
    sha256: str | None


class Listing(NamedTuple):
    files: list[HubFile]  # those with safe names
    licence: str | None  # as the repository states it


def read_listing(repo: str) -> Listing:
    """Ask the hub for the files and the licence of a repository."""
    api = HfApi(endpoint=_endpoint())
    try:
        info = api.model_info(repo, files_metadata=True, timeout=30)
        files = [_hub_file(repo, info.sha, sibling) for sibling in info.siblings or ()]
        licence = _licence(info.tags or ())
    except (HFValidationError, HfHubHTTPError):
        raise
    except (TypeError, KeyError, ValueError) as error:  # JSON of another shape, or none
        raise ModelError(
            f"The answer for {repo} is not from a model hub. Check HF_ENDPOINT and any proxy."
        ) from error
    return Listing([file for file in files if _is_safe(file.name)], licence)


def _licence(tags: Iterable[str]) -> str | None:
    prefix = "license:"
    return next((tag.removeprefix(prefix) for tag in tags if tag.startswith(prefix)), None)


def _hub_file(repo: str, commit: str | None, sibling: RepoSibling) -> HubFile:
    """Convert the answer of a hub, whose types nobody has checked. Raises ValueError."""
    digest = sibling.lfs.sha256 if sibling.lfs else None
    found = (repo, commit, sibling.rfilename, sibling.size or None, digest or None)
    return msgspec.convert(found, HubFile)


def _is_safe(name: str) -> bool:
    """Return whether a name from a hub stays inside the folder that it is joined to."""
    parts = PurePosixPath(name).parts
    return bool(parts) and not any(
        part in ("..", "/") or part.startswith(".") or set(part) & {"\\", ":", "\0"}
        for part in parts
    )


def _download(file: HubFile, part: Path, final: Path, title: str, progress: Progress) -> None:
    """Complete the partial file `part`, and make it visible if it is whole."""
    with task(progress, file.size_bytes, f"Downloading {title}") as advance:
        _complete(file, part, advance)
    if file.sha256 is not None:
        _verify(file, part)
    publish(part, final)


def _complete(file: HubFile, part: Path, advance: Advance) -> None:
    url = hf_hub_url(file.repo, file.name, revision=file.commit, endpoint=_endpoint())
    with part.open("ab") as output:
        if file.size_bytes is not None and output.tell() > file.size_bytes:
            output.seek(0)
            output.truncate()
        have_bytes = output.tell()
        require_room(part.parent, (file.size_bytes or 0) - have_bytes)
        advance(have_bytes)
        # Unlike hf_hub_download, which starts again after a failure, this resumes the part.
        http_get(
            url,
            output,
            resume_size=have_bytes,
            headers=build_hf_headers() | {"Accept-Encoding": "identity"},
            expected_size=file.size_bytes,
            tqdm_class=cast(Any, lambda **_: nullcontext(SimpleNamespace(update=advance))),
        )


def _verify(file: HubFile, part: Path) -> None:
    with part.open("rb") as stream:
        digest = file_digest(stream, "sha256").hexdigest()
    if digest != file.sha256:
        part.unlink()
        raise ModelError(
            f"{file.name} from {file.repo} arrived damaged (SHA-256 {digest}, expected "
            f"{file.sha256}); it was not kept. Pull again."
        )


def _endpoint() -> str | None:
    # Read at each call, because huggingface_hub only reads it when it is imported.
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or None


@contextmanager
def explained(repo: str) -> Iterator[None]:
    """Turn the errors of huggingface_hub into one sentence and a remedy."""
    try:
        yield
    except HfHubHTTPError as error:
        raise ModelError(_refused(repo, error)) from error
    except ValueError as error:  # an invalid id, or a file too large for plain HTTP
        raise ModelError(f"Cannot fetch {repo}: {error}") from error
    except OfflineModeIsEnabled as error:
        raise ModelError(
            f"{repo} is not on this machine and HF_HUB_OFFLINE is set. Unset it to fetch the model."
        ) from error
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise ModelError(
            f"Cannot reach the hub for {repo} ({error}). Check the network, or HF_ENDPOINT for a "
            "mirror, and pull again: the download resumes where it stopped."
        ) from error


def _refused(repo: str, error: HfHubHTTPError) -> str:
    status = error.response.status_code
    if isinstance(error, GatedRepoError):
        return f"{repo} has terms to accept. Accept them on its page, then set HF_TOKEN."
    if isinstance(error, RepositoryNotFoundError) or status == 404:
        return (
            f"The hub has no repository {repo}, or it is private. Check the spelling; for a "
            "private one set HF_TOKEN."
        )
    if status in (401, 403):
        return f"The hub denies access to {repo}. Set HF_TOKEN to a token that may read it."
    return f"The hub answered {status} for {repo}. Pull again in a while."


def find_pulled(source: HubModel) -> Path | None:
    """Return the first file or the folder of a model that is complete on this machine, without
    asking the hub.

    A bare org/repo means the model that was pulled from it before, if there is only one.
    """
    if source.wanted is None and is_model_folder(source.folder):
        return source.folder
    names = [path.relative_to(source.folder).as_posix() for path in source.folder.rglob("*.gguf")]
    chosen = choose(names, source.wanted)
    return None if isinstance(chosen, Unclear) else source.folder / chosen[0]


def fetch(source: HubModel, models_dir: Path, progress: Progress) -> Path:
    """Fetch all missing files of the model. Returns the path of the first one, or of the folder.

    The projector is fetched first, so that a complete model always has it.
    """
    with explained(source.repo):
        listed, licence = read_listing(source.repo)
        if source.wanted is None and (files := folder_files(listed)):
            progress.say(_introduction(source, files, "the whole folder", licence))
            return _fetch_folder(files, source.folder, models_dir, progress)
        files, reason = _choose_files(source, listed)
        progress.say(_introduction(source, files, files[0].name, licence) + reason)
        first = source.folder / files[0].name
        _fetch_beside(first, listed, models_dir, progress)
        for number, file in enumerate(files, 1):
            title = file.name + (f" ({number} of {len(files)})" if len(files) > 1 else "")
            _fetch_file(file, source.folder / file.name, models_dir, progress, title)
    return first


def folder_files(listed: list[HubFile]) -> list[HubFile]:
    """Return the files of a model folder, or none if the repository has GGUF files or no such
    model."""
    names = {file.name for file in listed}
    has_weights = any(fnmatchcase(name, WEIGHTS) for name in names)
    if CONFIG not in names or not has_weights or any(name.endswith(".gguf") for name in names):
        return []
    return [file for file in listed if _is_folder_file(file.name)]


def _is_folder_file(name: str) -> bool:
    if "/" in name:
        return MODULE_FILE.fullmatch(name) is not None
    return any(fnmatchcase(name, kind) for kind in FOLDER_FILES)


def _fetch_folder(files: list[HubFile], final: Path, models_dir: Path, progress: Progress) -> Path:
    """Fetch all files of one commit, and make them visible together."""
    with workspace(final, models_dir, progress) as scratch:
        if is_model_folder(final):  # another process was faster
            return final
        folder = scratch / sha256(files[0].commit.encode()).hexdigest()[:16]
        folder.mkdir(exist_ok=True)
        missing = [file for file in files if not (folder / file.name).is_file()]
        require_room(scratch, _size_bytes(missing))
        for file in missing:
            title = f"{file.name} ({files.index(file) + 1} of {len(files)})"
            part = folder / f"{file.name}.part"
            part.parent.mkdir(exist_ok=True)
            _download(file, part, folder / file.name, title, progress)
        publish_folder(folder, final)
    return final


def fetch_projector(
    source: HubModel, model: Path, models_dir: Path, progress: Progress
) -> Path | None:
    """Fetch only the projector, next to the model. None if the repository has none."""
    with explained(source.repo):
        return _fetch_beside(model, read_listing(source.repo).files, models_dir, progress)


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


def _introduction(source: HubModel, files: list[HubFile], what: str, licence: str | None) -> str:
    """Say what is about to be pulled: files, size and licence."""
    name = f"{source.name} is " if source.name else "Pulling "
    size = decimal(_size_bytes(files))
    terms = f"licence {licence}" if licence else "no licence stated"
    return f"{name}{source.repo}, {what}: {size}, {terms}."


def _size_bytes(files: list[HubFile]) -> int:
    return sum(file.size_bytes or 0 for file in files)


def _choose_files(source: HubModel, listed: list[HubFile]) -> tuple[list[HubFile], str]:
    """Return the files of the model, and a sentence that explains the choice or is empty."""
    files = {file.name: file for file in listed}
    if source.name and source.wanted is None:
        found = candidates({name: file.size_bytes or 0 for name, file in files.items()})
        if found:
            chosen, reason = _fitting(source.name, source.repo, found, host_free_bytes())
            return [files[name] for name in chosen.files], reason
    wanted = choose(files.keys(), source.wanted)
    if not isinstance(wanted, Unclear):
        return [files[name] for name in wanted], ""
    raise ModelError(_unclear(source, listed, wanted))


def _fitting(
    name: str, repo: str, found: list[Candidate], free_bytes: int
) -> tuple[Candidate, str]:
    """Choose the first quantisation whose weights leave a quarter of the free memory for the KV
    cache. Raises ModelError if none does."""
    first, room_bytes = found[0], free_bytes * 3 // 4
    free = f"{decimal(free_bytes)} of memory that this machine has free"
    chosen = next((each for each in found if each.size_bytes <= room_bytes), None)
    if chosen is first:
        return (
            first,
            f" {first.quant} is the usual balance of quality and size. It fits the {free}.",
        )
    if chosen is not None:
        too_large = f"{first.quant} ({decimal(first.size_bytes)})"
        return chosen, f" {too_large} is too large for the {free}, so {chosen.quant} was chosen."
    least = min(found, key=lambda each: each.size_bytes)
    smaller = smaller_names(name)
    others = f"Pull a smaller size ({', '.join(smaller)}), or" if smaller else "To pull it anyway,"
    raise ModelError(
        f"{name} is too large for the {free}: the smallest file ({least.quant}) has "
        f"{decimal(least.size_bytes)}, and a quarter of the memory is needed for the KV cache. "
        f"{others} name the file: {repo}:{least.files[0]}."
    )


def _unclear(source: HubModel, listed: list[HubFile], chosen: Unclear) -> str:
    if folder_files(listed):
        return f"{source.repo} is one model in a folder. Omit :{source.wanted}."
    shown = ", ".join(chosen.choices[:MAX_CHOICES_SHOWN])
    left_out = len(chosen.choices) - MAX_CHOICES_SHOWN
    more = f" and {left_out} more" if left_out > 0 else ""
    remedy = (
        f"Name one as {source.repo}:FILE, of {shown}{more}." if shown else "Choose another one."
    )
    return f"{source.repo} {chosen.reason}. {remedy}"


def _fetch_file(
    file: HubFile, final: Path, models_dir: Path, progress: Progress, title: str
) -> None:
    with workspace(final, models_dir, progress) as folder:
        if final.is_file():  # from an earlier pull or another process
            return
        # By content, so that other content is never appended. Hashed, because a hub chose the text.
        content = sha256((file.sha256 or file.commit).encode()).hexdigest()
        _download(file, folder / f"{content}.part", final, title, progress)
