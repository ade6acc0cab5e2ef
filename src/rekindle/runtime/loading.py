"""Loads the engine of a model with the options from its settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rekindle.engine.base import Engine, EngineOptions
from rekindle.engine.registry import load_engine
from rekindle.errors import ProjectorError
from rekindle.protocol.frames import Loading, LogLine, ToFront
from rekindle.protocol.requests import LoadModel


def load_model(load: LoadModel, ram_bytes: int, send: Callable[[ToFront], None]) -> Engine:
    """Load the engine and send its progress to the front.

    A projector that fails to load is left out with a warning, unless the model must see images.
    """

    def on_progress(fraction: float) -> None:
        send(Loading(fraction))

    options = replace(engine_options(load), host_bytes=ram_bytes)
    name = load.settings.engine
    try:
        return load_engine(options, on_progress, name=name)
    except ProjectorError as error:
        if load.requires_vision:
            raise
        text = f"serving text without images: {error}. Start with --no-vlm to silence this warning"
        send(LogLine("warning", text))
    return load_engine(replace(options, mmproj=None), on_progress, name=name)


def engine_options(load: LoadModel) -> EngineOptions:
    settings = load.settings
    return EngineOptions(
        path=Path(load.path),
        mmproj=Path(load.mmproj) if load.mmproj else None,
        adapter=Path(load.adapter) if load.adapter else None,
        parallel=settings.parallel,
        context_tokens=settings.max_model_len,
        kv_fraction=settings.kv_fraction,
        memory_bytes=load.memory_bytes,
        park_fraction=settings.park_fraction,
        threads=settings.thread_count,
        gpu_layers=settings.gpu_layers,
        gpus=settings.gpu,
        gpu_shares=settings.tensor_split,
        kv_type=settings.kv_type,
    )
