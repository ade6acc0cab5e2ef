"""Chooses the engine that loads a model, by the format of its files.

The module of an engine is imported when a model needs it. An engine from another package is a
module that the environment names, with its own `ENGINE`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from rekindle.engine.base import Embedder, Engine, EngineOptions, OnProgress
from rekindle.errors import ConfigError, ModelError
from rekindle.models.folder import is_model_folder
from rekindle.protocol.frames import LibraryInfo
from rekindle.protocol.requests import ENGINE_MODULE


@dataclass(frozen=True, slots=True)
class EngineKind:
    """An engine: the models that it loads, and the factories that load them."""

    name: str
    format: str  # name of the file format, for messages
    matches: Callable[[Path], bool]
    factory: str  # "module:name" of a callable(EngineOptions, OnProgress) -> Engine
    embedder_factory: str | None = None  # the same for an Embedder; None: unsupported
    extra: str | None = None  # extra of our package that installs the imports of the module
    takes_adapters: bool = False
    library_info: str | None = None  # "module:name" of a callable() -> LibraryInfo

    def load(self, options: EngineOptions, on_progress: OnProgress) -> Engine:
        if options.adapter and not self.takes_adapters:
            raise ModelError(
                f"{self.name} takes no adapters: merge {options.adapter} into the model, or omit "
                "--adapter"
            )
        engine: Engine = self._resolve(self.factory)(options, on_progress)
        return engine

    def load_embedder(self, options: EngineOptions, on_progress: OnProgress) -> Embedder:
        if self.embedder_factory is None:
            raise ModelError(f"{self.name} computes no embeddings: give a model of another format")
        embedder: Embedder = self._resolve(self.embedder_factory)(options, on_progress)
        return embedder

    def _resolve(self, factory: str) -> Callable[[EngineOptions, OnProgress], Any]:
        try:
            found: Callable[[EngineOptions, OnProgress], Any] = resolve_name(factory)
        except ImportError as error:
            if self.extra is None:
                raise
            raise ModelError(
                f"{self.format} models need more packages ({error}): "
                f"pip install 'rekindle[{self.extra}]'"
            ) from error
        return found


def _is_gguf(path: Path) -> bool:
    """Judge by the name, so that a damaged file gets a precise error later, or by the magic."""
    if path.suffix.lower() == ".gguf":
        return True
    magic = b"GGUF"
    try:
        with path.open("rb") as file:
            return file.read(len(magic)) == magic
    except OSError:
        return False


ENGINES = (
    EngineKind(
        "llama.cpp",
        "GGUF",
        _is_gguf,
        "rekindle.engine.llamacpp.engine:LlamaCppEngine",
        "rekindle.engine.llamacpp.embedder:LlamaCppEmbedder",
        takes_adapters=True,
        library_info="rekindle.engine.llamacpp.capabilities:library_info",
    ),
    EngineKind(
        "mlx",
        "MLX",
        is_model_folder,
        "rekindle.engine.mlx.engine:MlxEngine",
        "rekindle.engine.mlx.embedder:MlxEmbedder",
        extra="mlx",
        takes_adapters=True,
    ),
)


def known_engines(environment: Mapping[str, str] = os.environ) -> tuple[EngineKind, ...]:
    """Return the engine that the environment adds, if any, and ours."""
    module = environment.get(ENGINE_MODULE)
    return (_added(module), *ENGINES) if module else ENGINES


def _added(module: str) -> EngineKind:
    try:
        kind = import_module(module).ENGINE
    except (ImportError, AttributeError) as error:
        reason = f"{ENGINE_MODULE} names {module}, which is not an engine: {error}"
        raise ConfigError(reason) from error
    if not isinstance(kind, EngineKind):
        raise ConfigError(f"{ENGINE_MODULE} names {module}, whose ENGINE is not an EngineKind")
    return kind


def load_engine(
    options: EngineOptions, on_progress: OnProgress = lambda _done: None, *, name: str | None = None
) -> Engine:
    """Load a model with the engine `name`, or the first one that takes it; raises ModelError."""
    return kind_of(options.path, name).load(options, on_progress)


def load_embedder(options: EngineOptions, on_progress: OnProgress = lambda _done: None) -> Embedder:
    """Load a model for embeddings or reranking; raises ModelError."""
    return kind_of(options.path, None).load_embedder(options, on_progress)


def library_infos() -> list[LibraryInfo]:
    """Load the library of each engine that has one, and return what it can do."""
    named = [kind.library_info for kind in known_engines() if kind.library_info]
    return [resolve_name(name)() for name in named]


def kind_of(path: Path, name: str | None) -> EngineKind:
    """Return the engine `name`, or the first one that takes this model; raises ModelError."""
    engines = known_engines()
    default = next((kind for kind in engines if kind.matches(path)), None)
    chosen = default if name is None else next((k for k in engines if k.name == name), None)
    supported = ", ".join(f"{kind.format} ({kind.name})" for kind in engines)
    if chosen is None:
        what = f"no engine loads {path.name}" if name is None else f"no engine is called {name}"
        raise ModelError(f"{what}; supported formats: {supported}")
    if default is not None and not chosen.matches(path):
        raise ModelError(
            f"{path.name} is a model in the format {default.format}, which {chosen.name} does not "
            f"load: omit --engine, or give --engine {default.name}"
        )
    return chosen
