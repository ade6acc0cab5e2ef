"""Lists the models that a server offers, in the order of its settings, which numbers them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from rekindle.config import Config
from rekindle.config.presets import DeclaredModel
from rekindle.errors import ConfigError, ModelError
from rekindle.models.catalogue import DEFAULT_EMBEDDING_MODEL, DEFAULT_MODEL, DEFAULT_VISION_MODEL
from rekindle.models.created import read_created
from rekindle.models.folder import CONFIG, is_model_folder, read_json
from rekindle.models.gguf import check_gguf, summarise_gguf
from rekindle.models.gguf_files import whole_models
from rekindle.models.local import pulled_models

Kind = Literal["text", "embedding", "rerank"]

POOLING_RANK = 4  # llama.cpp's LLAMA_POOLING_TYPE
#: Classes in a folder's config.json that make vectors or scores.
_ENCODERS = re.compile(r"Bert|ForSequenceClassification|ForMaskedLM|Roberta")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model that clients may name, whether it is loaded or not."""

    name: str
    source: str  # as for --model
    kind: Kind = "text"
    mmproj: Path | None = None
    adapter: Path | None = None
    at_start: bool = False  # loaded when the server starts
    keep_loaded: bool = False
    idle_unload_s: float | None = None
    max_model_len: int | None = None
    system: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    is_created: bool = False  # by a request, which may also delete it


def model_specs(config: Config) -> dict[str, ModelSpec]:
    """Return all models by name: `--model`, `--embedding-model`, `models`, `--models-dir`."""
    found = {spec.name: spec for spec in _at_start(config)}
    for name, declared in config.models.items():
        for spec in _declared(name, declared):
            if spec.name in found:
                raise ConfigError(f"two models are called {spec.name}: rename one under `models`")
            found[spec.name] = spec
    for spec in _found_on_disk(config):
        found.setdefault(spec.name, spec)
    if not any(spec.kind == "text" for spec in found.values()):
        raise ConfigError(
            f"there is no model in {config.models_dir}: put a .gguf file there, pull one, or give "
            "--model"
            if config.serves_models_dir
            else "no model under `models` generates text: add one, or give --model"
        )
    return {name: with_idle_limit(spec, config) for name, spec in found.items()}


def with_idle_limit(spec: ModelSpec, config: Config) -> ModelSpec:
    return replace(spec, idle_unload_s=spec.idle_unload_s or config.idle_unload)


def _at_start(config: Config) -> Iterator[ModelSpec]:
    """The models that are loaded at the start and stay, and the adapters of the first ones."""
    texts, folder = served_names(config), adapter_folder(config)
    stays: dict[str, Any] = {"at_start": True, "keep_loaded": True}
    for served, source in texts.items():
        yield ModelSpec(name=served, source=source, mmproj=config.mmproj, adapter=folder, **stays)
    for served, source in served_embedders(config).items():
        yield ModelSpec(name=served, source=source, kind="embedding", **stays)
    for served, source in texts.items():
        for name, file in adapter_files(config).items():
            adapted = f"{served}:{name}"
            yield ModelSpec(name=adapted, source=source, mmproj=config.mmproj, adapter=file)


def _found_on_disk(config: Config) -> Iterator[ModelSpec]:
    if config.serves_models_dir:
        yield from _in_folder(config.models_dir)
    if config.loads_on_demand:
        for name, record in read_created(config.models_dir).items():
            yield created_spec(name, record)


def created_spec(name: str, record: Mapping[str, Any]) -> ModelSpec:
    """Return the model that a request has created, from its record on disk."""
    return ModelSpec(
        name=name,
        source=record["from"],
        kind=kind_of(record["from"]),
        adapter=Path(record["adapter"]) if record.get("adapter") else None,
        max_model_len=record.get("max_model_len"),
        system=record.get("system"),
        parameters=record.get("parameters", {}),
        is_created=True,
    )


def _declared(name: str, declared: DeclaredModel) -> Iterator[ModelSpec]:
    source = declared.model or name
    if declared.embedding is None:
        kind = kind_of(source)
    else:
        kind = "embedding" if declared.embedding else "text"
    spec = ModelSpec(
        name=name,
        source=source,
        kind=kind,
        mmproj=declared.mmproj,
        at_start=declared.keep_loaded,
        keep_loaded=declared.keep_loaded,
        idle_unload_s=declared.idle_unload,
        max_model_len=declared.max_model_len,
        system=declared.system,
        parameters=declared.parameters.model_dump(exclude_none=True),
    )
    yield spec
    for adapter, file in declared.adapters.items():
        yield replace(
            spec, name=f"{name}:{adapter}", adapter=file, at_start=False, keep_loaded=False
        )


def _in_folder(folder: Path) -> Iterator[ModelSpec]:
    """List the files and model folders of a folder, and the models that were pulled into it."""
    pulled = pulled_models(folder)
    known = {model.path for model in pulled}
    for model in pulled:
        name = model.path.stem if model.name == str(model.path) else model.name
        yield ModelSpec(name=name, source=str(model.path), kind=kind_of(str(model.path)))
    files = [path.name for path in folder.glob("*.gguf") if path.is_file()]
    sources = [folder / first for first, *_ in whole_models(files)]
    sources += [path for path in sorted(folder.glob("*")) if is_model_folder(path)]
    for path in sorted(sources):
        if path not in known and not _is_adapter(path):
            name = path.name if path.is_dir() else path.stem
            yield ModelSpec(name=name, source=str(path), kind=kind_of(str(path)))


def _is_adapter(path: Path) -> bool:
    if path.is_dir():
        return False
    try:
        check_gguf(path)
    except ModelError:
        return False  # loading it will say what is wrong
    return summarise_gguf(path).fields.get("general.type") == "adapter"


def kind_of(source: str) -> Kind:
    """Read from the files what a model makes. A model that is not here yet generates text."""
    if source == DEFAULT_EMBEDDING_MODEL:
        return "embedding"
    path = Path(source).expanduser()
    try:
        if is_model_folder(path):
            classes = read_json(path / CONFIG).get("architectures") or []
            is_encoder = any(_ENCODERS.search(str(each)) for each in classes)
            return "embedding" if is_encoder or (path / "modules.json").is_file() else "text"
        if not path.is_file():
            return "text"
        check_gguf(path)
        fields = summarise_gguf(path).fields
    except (ModelError, OSError):
        return "text"  # loading it will say what is wrong
    architecture = fields.get("general.architecture")
    pooling = fields.get(f"{architecture}.pooling_type")
    if pooling == POOLING_RANK:
        return "rerank"
    return "embedding" if pooling is not None or "bert" in str(architecture) else "text"


def adapter_files(config: Config) -> dict[str, Path]:
    """The LoRA adapters of `--adapter` in GGUF, by name. Raises ConfigError."""
    found: dict[str, Path] = {}
    for given in config.adapter:
        name, _, file = given.rpartition("=")
        path = Path(file).expanduser()
        if path.is_dir():
            continue  # it belongs to a model in MLX's format
        name = name or path.stem
        if not re.fullmatch(r"[\w.-]{1,64}", name):
            raise ConfigError(f"`--adapter`: {name!r} cannot name an adapter: give NAME={file}")
        if found.setdefault(name, path) != path:
            raise ConfigError(f"`--adapter`: two adapters are called {name}: give NAME={file}")
        if not path.is_file():
            raise ConfigError(f"`--adapter`: there is no file or folder {path}")
    return found


def adapter_folder(config: Config) -> Path | None:
    """The folder of `--adapter`, which is loaded with the model itself."""
    folders = [path for each in config.adapter if (path := Path(each).expanduser()).is_dir()]
    if len(folders) > 1 or (folders and len(config.adapter) > 1):
        raise ConfigError("`--adapter`: a model in MLX's format takes one folder, and nothing else")
    return folders[0] if folders else None


def served_embedders(config: Config) -> dict[str, str]:
    """The models of `--embedding-model`, in order, keyed by the name that clients use."""
    return _by_served_name(config.embedding_model, taken=served_names(config))


def served_names(config: Config) -> dict[str, str]:
    """The models of `--model`, in order, keyed by the name that clients use."""
    if config.loads_on_demand and not config.model:
        return {}
    default = DEFAULT_VISION_MODEL if config.vlm and config.mmproj is None else DEFAULT_MODEL
    return _by_served_name(config.model or (default,))


def _by_served_name(names: Sequence[str], taken: Mapping[str, str] = {}) -> dict[str, str]:
    named: dict[str, str] = {}
    for name in names:
        served = _served_name(name)
        other = taken.get(served) or named.setdefault(served, name)
        if other != name or served in taken:
            raise ConfigError(
                f"{other} and {name} would both be called {served}: rename one of the files"
            )
    return named


def _served_name(name: str) -> str:
    """The stem of a file, the name of a folder, or the name as given."""
    path = Path(name)
    if path.is_file():
        return path.stem
    return path.resolve().name if is_model_folder(path) else name
