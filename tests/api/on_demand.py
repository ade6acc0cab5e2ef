"""The real application over models that are loaded when a request names them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rekindle.api.base.models import ServedModels
from rekindle.api.base.specs import ModelSpec
from rekindle.config import Config
from rekindle.config.presets import DeclaredModel
from rekindle.errors import ModelError
from rekindle.front.app import build_app
from rekindle.http.middleware import Drain, RequestMiddleware
from rekindle.protocol.frames import Ready
from rekindle.protocol.requests import LoadModel
from rekindle.worker.pool import LoadPolicy, ModelPool, PreparedLoad
from tests.api.scripted import Front, ScriptedRuntime

MODEL_BYTES = 100


class LoadableRuntime(ScriptedRuntime):
    """Is loaded when the test allows it."""

    def __init__(self, *scripts: Any, name: str = "tiny", **options: Any) -> None:
        super().__init__(*scripts, name=name, **options)
        self._when_loaded, self.supervisor.ready = self.supervisor.ready, None
        self.may_load = True
        self.damaged: str | None = None
        self.loads = 0

    @property
    def is_busy(self) -> bool:
        return self.open_turns > 0

    async def start(
        self, on_loading: Callable[[float], None] = lambda _done: None, load: Any = None
    ) -> None:
        self.loads += 1
        on_loading(0.25)
        while not self.may_load:
            await asyncio.sleep(0.005)
        if self.damaged:
            raise ModelError(self.damaged)
        self.supervisor.ready = self.supervisor.described = self._when_loaded

    async def stop(self, reason: str = "") -> None:
        self.supervisor.ready = None


class EmbedderRuntime(LoadableRuntime):
    def __init__(self, *scripts: Any, name: str = "vectors") -> None:
        super().__init__(*scripts, name=name)
        self._when_loaded = Ready(context_tokens=64, pool_tokens=0, dimensions=2)


class OnDemandFront(Front):
    """`loaded` names the models that the operator keeps loaded."""

    def __init__(
        self,
        *runtimes: LoadableRuntime,
        embedders: tuple[EmbedderRuntime, ...] = (),
        pinned: tuple[str, ...] = (),
        max_bytes: int | None = None,
        idle_unload_s: float | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(*runtimes, embedders=embedders, **settings)
        declared = {runtime.name: DeclaredModel() for runtime in runtimes}
        self.config = Config(models=declared, **settings)
        self.pinned, self.max_bytes, self.idle_unload_s = pinned, max_bytes, idle_unload_s
        self.made: list[LoadableRuntime] = []  # by requests
        self.pool = ModelPool()

    def app(self, drain: Drain | None = None) -> RequestMiddleware:
        self.pool = ModelPool(self.max_bytes)
        embedders = [each.name for each in self.embedders]
        specs = {
            each.name: ModelSpec(
                name=each.name,
                source=each.name,
                kind="embedding" if each.name in embedders else "text",
                at_start=each.name in self.pinned,
                keep_loaded=each.name in self.pinned,
                idle_unload_s=self.idle_unload_s,
            )
            for each in (*self.runtimes, *self.embedders)
        }
        for runtime in (*self.runtimes, *self.embedders):
            self._add(runtime, specs[runtime.name])
        models = ServedModels(
            self.config,
            [*self.runtimes],
            self.embedders,
            pool=self.pool,
            specs=specs,
            offer=self._offer,
        )
        return build_app(self.config, models, drain=drain)

    def _offer(self, spec: ModelSpec) -> LoadableRuntime:
        self.made.append(LoadableRuntime(name=spec.name))
        self._add(self.made[-1], spec)
        return self.made[-1]

    def _add(self, runtime: ScriptedRuntime, spec: ModelSpec) -> None:
        order = LoadModel(path=str(Path("/models") / spec.name), settings=self.config.runtime)
        prepared = PreparedLoad(order, MODEL_BYTES)
        policy = LoadPolicy(
            prepare=lambda: prepared,
            keep_loaded=spec.keep_loaded,
            idle_unload_s=spec.idle_unload_s,
        )
        self.pool.add(runtime, policy, is_loaded=runtime.ready is not None)
