"""Finds the files of models, estimates their memory, and makes the runtimes that load them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from msgspec import structs

from rekindle.api.base.specs import ModelSpec
from rekindle.config import Config
from rekindle.errors import ModelError
from rekindle.models.catalogue import HubModel, PackagedModel, locate
from rekindle.models.folder import has_vision, is_model_folder
from rekindle.models.gguf import check_gguf
from rekindle.models.gguf_files import split_names
from rekindle.models.progress import Progress
from rekindle.models.pull import find_projector, loadable, pull
from rekindle.protocol.requests import LoadModel
from rekindle.worker.client import RuntimeClient
from rekindle.worker.pool import LoadPolicy, ModelPool, PreparedLoad

log = logging.getLogger("rekindle.models")

PROCESS_BYTES = 160_000_000  # of the interpreter, its packages, and the engine's working memory
# Of the memory that the weights of a model leave of --max-memory, these parts are for its own KV
# pool (times --kv-fraction) and RAM cache. The rest is for the other models.
POOL_SHARE, RAM_SHARE = 1 / 2, 1 / 8
# A model that is loaded on request gets its share of the cache budgets as one of so many models.
MIN_SHARERS = 3


def find_files(spec: ModelSpec, config: Config, progress: Progress) -> LoadModel:
    """Return what to load. Pulls missing files. Raises ModelError."""
    folder, engine = config.models_dir, config.runtime.engine
    path = pull(spec.source, models_dir=folder, progress=progress)
    settings = config.runtime
    if spec.max_model_len is not None:
        settings = replace(settings, max_model_len=spec.max_model_len)
    if spec.kind != "text":
        return LoadModel(path=str(path), is_embedder=True, settings=settings)
    path = loadable(path, engine, models_dir=folder, progress=progress)
    if spec.adapter is not None and spec.adapter.is_file():
        check_gguf(spec.adapter)
    projector = _projector(spec, config, path, progress)
    return LoadModel(
        path=str(path),
        mmproj=str(projector) if projector else None,
        adapter=str(spec.adapter) if spec.adapter else None,
        requires_vision=bool(config.vlm or spec.mmproj),
        name=spec.name if spec.is_created else "",
        settings=settings,
    )


def _projector(spec: ModelSpec, config: Config, path: Path, progress: Progress) -> Path | None:
    """Return the file of the vision projector, or the model folder itself, which contains one."""
    if path.is_dir() and spec.mmproj is not None:
        raise ModelError(
            f"{spec.source} is a folder, which contains its projector if it has one. Give --vlm in "
            "place of --mmproj."
        )
    if config.vlm is False:
        return None
    if path.is_dir():
        if config.vlm and not has_vision(path):
            raise ModelError(
                f"{spec.source} has no vision part (`vision_config` in config.json), so it takes "
                "no images. Omit --vlm."
            )
        only_text = spec.adapter is not None and not config.vlm  # adapters are for text
        return path if has_vision(path) and not only_text else None
    if spec.mmproj is not None:
        check_gguf(spec.mmproj)
        return spec.mmproj
    return find_projector(
        spec.source,
        path,
        models_dir=config.models_dir,
        progress=progress,
        required=bool(config.vlm),
    )


def budgeted(load: LoadModel, max_memory: int | None) -> PreparedLoad:
    """Estimate the memory of a model. Within a limit, size its caches by the limit."""
    weights = weights_bytes(load)
    if max_memory is None:
        return PreparedLoad(load, weights + PROCESS_BYTES)
    spare = max(max_memory - weights - PROCESS_BYTES, 0)
    settings, pool_bytes = load.settings, int(spare * POOL_SHARE)
    if settings.ram_cache is None:
        settings = replace(settings, ram_cache=int(spare * RAM_SHARE))
    load = structs.replace(load, settings=settings, memory_bytes=pool_bytes)
    cache_bytes = 0
    if not load.is_embedder:
        cache_bytes = int(settings.kv_fraction * pool_bytes) + (settings.ram_cache or 0)
    return PreparedLoad(load, weights + PROCESS_BYTES + cache_bytes)


def weights_bytes(load: LoadModel) -> int:
    """Size of the files of a model: all parts of a split one, its projector and its adapter."""
    path = Path(load.path)
    files = [path.with_name(name) for name in split_names(path.name)]
    if is_model_folder(path):
        files = [each for each in path.iterdir() if each.is_file()]
    files += [Path(each) for each in (load.mmproj, load.adapter) if each]
    return sum(file.stat().st_size for file in files if file.is_file())


class LoggedProgress:
    """Reports a download that a load needs in the server's log."""

    def say(self, line: str) -> None:
        log.info("%s", line)

    def start(self, total_bytes: int | None, description: str) -> None:
        log.info("fetching %s (%d MB)", description, (total_bytes or 0) / 1e6)

    def advance(self, size_bytes: int) -> None:
        pass

    def done(self) -> None:
        pass


class ModelLibrary:
    """Makes the runtime of each model, and tells the pool how to load it."""

    def __init__(self, config: Config, pool: ModelPool, loads: Mapping[str, LoadModel]) -> None:
        """`loads` are the models that are loaded at the start, whose files were found."""
        self._config = config
        self._pool = pool
        self._at_start = dict(loads)
        self._specs: list[ModelSpec] = []
        self._shares = [load.files for load in loads.values() if not load.is_embedder]

    def offer(self, spec: ModelSpec) -> RuntimeClient:
        """Add a model to the pool. Nothing is loaded yet."""
        self._specs.append(spec)
        load = self._at_start.get(spec.name) or self._unprepared(spec)
        runtime = RuntimeClient(
            spec.name,
            structs.replace(load, served=self._served(load, spec)),
            queue=self._config.queue,
            step_timeout_s=self._config.step_timeout,
        )
        policy = LoadPolicy(
            prepare=partial(self._prepare, spec),
            keep_loaded=spec.keep_loaded,
            idle_unload_s=spec.idle_unload_s,
        )
        self._pool.add(runtime, policy)
        return runtime

    def _unprepared(self, spec: ModelSpec) -> LoadModel:
        """Describe a model that is not loaded, and whose files may be missing."""
        path = Path(spec.source)
        with suppress(ModelError):
            match locate(spec.source, self._config.models_dir):
                case Path() as found:
                    path = found
                case PackagedModel() as source:
                    path = source.path
                case HubModel() as source:
                    path = source.folder
        return LoadModel(
            path=str(path), is_embedder=spec.kind != "text", settings=self._config.runtime
        )

    def _prepare(self, spec: ModelSpec) -> PreparedLoad:
        load = find_files(spec, self._config, LoggedProgress())
        load = structs.replace(load, served=self._served(load, spec))
        return budgeted(load, self._config.max_memory)

    def _served(self, load: LoadModel, spec: ModelSpec) -> list[str]:
        """The models that share the cache budgets with this one. A model that is loaded on request
        counts as one of a few, because not all of them are loaded at a time."""
        if spec.name in self._at_start:
            return self._shares
        alike = [
            _files(load, other)
            for other in self._specs
            if other.source == spec.source and other.kind == spec.kind
        ]
        names = dict.fromkeys([load.files, *self._shares, *alike])
        return [*names, *["another model"] * (MIN_SHARERS - len(names))]


def _files(load: LoadModel, spec: ModelSpec) -> str:
    """`LoadModel.files` of a model with the same weights."""
    return structs.replace(
        load,
        adapter=str(spec.adapter) if spec.adapter else None,
        mmproj=str(spec.mmproj) if spec.mmproj else load.mmproj,
        name=spec.name if spec.is_created else "",
    ).files
