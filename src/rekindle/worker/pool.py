"""Decides which models are loaded: loads one when a request needs it, and unloads idle ones."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from math import ceil
from typing import Any, Literal, TypeVar

from rekindle.errors import BadRequest, ModelError, ModelLoadFailed, RekindleError, Unavailable
from rekindle.protocol.requests import LoadModel
from rekindle.worker.client import RuntimeClient
from rekindle.worker.usage import ProcessUsage, usage_of

log = logging.getLogger("rekindle.models")

Status = Literal["loaded", "loading", "unloaded", "failed"]
T = TypeVar("T")

RETRY_DELAYS_S = (1.0, 5.0, 30.0, 60.0)  # after a load that failed; the last one repeats
UPKEEP_S = 1.0
# When a load has waited this long for memory, the least recently used model gets no new requests.
MAX_BUSY_S = 5.0
FOREVER = float("inf")


@dataclass(frozen=True, slots=True)
class PreparedLoad:
    """The files of a model are here. `estimate_bytes` is the memory that it will take."""

    load: LoadModel
    estimate_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPolicy:
    """How a model is loaded, and when it is unloaded."""

    prepare: Callable[[], PreparedLoad]  # runs in a thread, and may download the files
    keep_loaded: bool = False  # never unloaded to make room, nor because it is idle
    idle_unload_s: float | None = None  # None: only to make room


class LoadCancelled(Unavailable):
    code = "model_load_cancelled"

    def __init__(self, name: str) -> None:
        super().__init__(f"loading the model {name} was cancelled; send the request again")


class PooledModel:
    """The state of one model in the pool. Only the pool changes it."""

    def __init__(self, runtime: RuntimeClient, policy: LoadPolicy, *, is_loaded: bool) -> None:
        self.runtime = runtime
        self.policy = policy
        self.is_loaded = is_loaded
        self.is_retiring = False  # gets no new requests, because another model needs its memory
        self.users = 0  # requests that are being answered
        self.waiters = 0  # requests that wait until it is loaded
        self.last_used_s = 0.0  # on the pool's clock
        self.keep_alive_s: float | None = None  # of the last request, in place of the policy's
        self.loading: asyncio.Task[RekindleError | None] | None = None
        self.has_begun = False  # the process of the load was started
        self.fraction = 0.0  # of the load
        self.on_progress: Callable[[float], None] = lambda _fraction: None
        self.unloading: asyncio.Task[None] | None = None
        self.failure: str | None = None
        self.failures = 0  # in a row
        self.retry_at_s = 0.0
        self.estimate_bytes = 0
        self.measured_bytes = 0

    @property
    def name(self) -> str:
        return self.runtime.name

    @property
    def is_usable(self) -> bool:
        return self.is_loaded and not self.is_retiring and self.unloading is None

    @property
    def is_idle(self) -> bool:
        """Whether it can be unloaded without disturbing a request."""
        is_awaited = self.waiters > 0 and not self.is_retiring
        return not self.users and not is_awaited and not self.runtime.is_busy

    @property
    def used_bytes(self) -> int:
        """The memory to count. State fills it slowly, so the estimate counts from the start."""
        has_process = self.is_loaded or self.has_begun or self.unloading is not None
        return max(self.estimate_bytes, self.measured_bytes) if has_process else 0

    @property
    def idle_limit_s(self) -> float | None:
        """How long it may be idle. None: as long as nothing needs its memory."""
        if self.policy.keep_loaded:
            return None
        limit_s = self.policy.idle_unload_s if self.keep_alive_s is None else self.keep_alive_s
        return None if limit_s == FOREVER else limit_s

    @property
    def status(self) -> Status:
        if self.loading is not None:
            return "loading"
        if self.is_loaded and self.unloading is None:
            return "loaded" if self.runtime.ready is not None else "loading"
        return "failed" if self.failure is not None else "unloaded"


class ModelPool:
    """The models of a server, within a memory limit. Runs on one event loop.

    Loads happen one at a time, in the order of the requests, so that memory is counted once.
    """

    def __init__(
        self,
        max_bytes: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        measure: Callable[[int], ProcessUsage] = usage_of,
    ) -> None:
        self.max_bytes = max_bytes
        self.clock = clock
        self._usage_of = measure
        self._models: dict[str, PooledModel] = {}
        self._turn = asyncio.Lock()  # to load
        self._changed = asyncio.Event()  # replaced after each change
        self._upkeep: asyncio.Task[None] | None = None

    # -- what is there ---------------------------------------------------------------------------

    def add(self, runtime: RuntimeClient, policy: LoadPolicy, *, is_loaded: bool = False) -> None:
        self._models[runtime.name] = PooledModel(runtime, policy, is_loaded=is_loaded)
        self._models[runtime.name].last_used_s = self.clock()

    async def remove(self, runtime: RuntimeClient) -> None:
        """Unload a model and forget it. Raises BadRequest while it answers requests."""
        await self.unload(runtime)
        del self._models[runtime.name]

    def model(self, runtime: RuntimeClient) -> PooledModel:
        return self._models[runtime.name]

    @property
    def used_bytes(self) -> int:
        return sum(model.used_bytes for model in self._models.values())

    # -- using -----------------------------------------------------------------------------------

    @asynccontextmanager
    async def use(self, runtime: RuntimeClient) -> AsyncIterator[None]:
        """Load the model if needed, and keep it loaded until the block ends.

        Raises ModelLoadFailed, also during the pause after a failed load.
        """
        model = self._models[runtime.name]
        if not model.is_usable:
            await self._wait_until_usable(model)
        model.users += 1
        try:
            yield
        finally:
            model.users -= 1
            model.last_used_s = self.clock()
            self._notify()

    async def _wait_until_usable(self, model: PooledModel) -> None:
        model.waiters += 1
        try:
            while not model.is_usable:
                await self._join_load(model)
                if self._models.get(model.name) is not model:
                    raise Unavailable(f"the model {model.name} was removed")
        finally:
            model.waiters -= 1
            if not model.waiters and model.loading and not model.has_begun:
                model.loading.cancel()  # nobody waits for it any more
            self._notify()

    async def _join_load(self, model: PooledModel) -> None:
        """Wait for the load that runs, or start one. Raises its error."""
        if model.loading is None:
            if (wait_s := model.retry_at_s - self.clock()) > 0 and model.failure is not None:
                raise ModelLoadFailed(model.name, model.failure, ceil(wait_s))
            model.loading = self._begin_load(model)
        task = model.loading
        await asyncio.wait({task})
        if task.cancelled():
            raise LoadCancelled(model.name)
        if task.result() is not None:
            wait_s = max(model.retry_at_s - self.clock(), 0)
            raise ModelLoadFailed(model.name, model.failure or "unknown", ceil(wait_s))

    async def load(
        self, runtime: RuntimeClient, on_progress: Callable[[float], None] = lambda _done: None
    ) -> None:
        """Load a model that no request needs yet. Raises the reason if that fails."""
        model = self._models[runtime.name]
        model.on_progress = on_progress
        model.waiters += 1
        try:
            while not model.is_usable:
                model.loading = model.loading or self._begin_load(model)
                task = model.loading
                await asyncio.wait({task})
                if task.cancelled():
                    raise LoadCancelled(model.name)
                if (error := task.result()) is not None:
                    raise error
        finally:
            model.waiters -= 1

    def keep_alive(self, runtime: RuntimeClient, limit_s: float) -> None:
        """Unload the model when it was idle for this long, or FOREVER, in place of its policy."""
        self._models[runtime.name].keep_alive_s = limit_s

    # -- loading ---------------------------------------------------------------------------------

    def _begin_load(self, model: PooledModel) -> asyncio.Task[RekindleError | None]:
        task = asyncio.create_task(self._load_and_record(model))
        task.add_done_callback(lambda ended: self._load_ended(model, ended))
        return task

    async def _load_and_record(self, model: PooledModel) -> RekindleError | None:
        try:
            await self._load(model)
        except (RekindleError, OSError) as error:
            delay_s = RETRY_DELAYS_S[min(model.failures, len(RETRY_DELAYS_S) - 1)]
            model.failures += 1
            model.failure, model.retry_at_s = _without_folders(error), self.clock() + delay_s
            log.error("loading %s failed: %s", model.name, error)
            return error if isinstance(error, RekindleError) else ModelError(str(error))
        model.failure, model.failures = None, 0
        return None

    def _load_ended(self, model: PooledModel, task: asyncio.Task[RekindleError | None]) -> None:
        if model.loading is task:
            model.loading, model.has_begun, model.fraction = None, False, 0.0
        if task.cancelled():
            log.info("loading %s was cancelled", model.name)
        elif error := task.exception():
            log.error("loading %s failed unexpectedly", model.name, exc_info=error)
        self._notify()

    async def _load(self, model: PooledModel) -> None:
        prepared = await _in_thread(model.policy.prepare)
        async with self._turn:
            if model.unloading is not None:
                await asyncio.wait({model.unloading})
            if model.is_usable:
                return  # the model that needed its memory needs it no longer
            model.estimate_bytes = max(prepared.estimate_bytes, model.measured_bytes)
            await self._make_room(model)
            model.has_begun = True
            began_s = self.clock()

            def on_loading(fraction: float) -> None:
                model.fraction = fraction
                model.on_progress(fraction)

            await model.runtime.start(on_loading, prepared.load)
            model.is_loaded, model.last_used_s = True, self.clock()
            self._measure(model)
            took_s = model.last_used_s - began_s
            log.info(
                "loaded %s in %.1f s: %s", model.name, took_s, _megabytes(model.measured_bytes)
            )

    async def _make_room(self, model: PooledModel) -> None:
        """Unload idle models, least recently used first, until this one fits."""
        if self.max_bytes is None:
            return
        needed = model.estimate_bytes
        pinned = sum(
            other.used_bytes
            for other in self._models.values()
            if other is not model and other.policy.keep_loaded
        )
        if needed + pinned > self.max_bytes:
            taken = f", and pinned models take {_megabytes(pinned)}" if pinned else ""
            raise ModelError(
                f"it needs about {_megabytes(needed)}, but --max-memory is "
                f"{_megabytes(self.max_bytes)}{taken}: raise --max-memory, or lower "
                "--max-model-len, --kv-fraction or --ram-cache"
            )
        waiting_since_s = self.clock()
        retiring: list[PooledModel] = []
        try:
            while self.used_bytes - model.used_bytes + needed > self.max_bytes:
                if victim := next(iter(self._by_last_use(lambda each: each.is_idle)), None):
                    log.info("unloading %s to make room for %s", victim.name, model.name)
                    await asyncio.wait({self._start_unload(victim)})
                    continue
                has_left = not any(each.is_loaded for each in retiring)
                if has_left and self.clock() - waiting_since_s > MAX_BUSY_S:
                    for each in self._by_last_use(lambda each: not each.is_retiring)[:1]:
                        each.is_retiring = True
                        retiring.append(each)
                await self._wait_for_change()
        finally:
            for each in retiring:
                each.is_retiring = False
            self._notify()

    def _by_last_use(self, condition: Callable[[PooledModel], bool]) -> list[PooledModel]:
        """The models that may be unloaded and meet the condition, least recently used first."""
        found = [
            each
            for each in self._models.values()
            if each.is_loaded
            and each.unloading is None
            and not each.policy.keep_loaded
            and condition(each)
        ]
        return sorted(found, key=lambda each: each.last_used_s)

    # -- unloading -------------------------------------------------------------------------------

    async def unload(self, runtime: RuntimeClient) -> None:
        """Unload a model, or cancel its load. Raises BadRequest while it answers requests."""
        model = self._models[runtime.name]
        if model.loading is not None:
            model.loading.cancel()
            await asyncio.wait({model.loading})
        if model.is_loaded and model.unloading is None:
            if not model.is_idle:
                raise ModelBusy(model.name)
            self._start_unload(model)
        if model.unloading is not None:
            await asyncio.wait({model.unloading})
        model.failure, model.failures, model.retry_at_s = None, 0, 0.0

    def _start_unload(self, model: PooledModel) -> asyncio.Task[None]:
        """Unload in a task of its own. A load that is cancelled must not interrupt it."""
        self._measure(model)
        model.unloading = asyncio.create_task(self._unload(model))
        return model.unloading

    async def _unload(self, model: PooledModel) -> None:
        try:
            await model.runtime.stop(f"model {model.name} is being unloaded; send it again")
        finally:
            model.is_loaded, model.unloading, model.keep_alive_s = False, None, None
            model.is_retiring = False
            log.info("unloaded %s", model.name)
            self._notify()

    # -- upkeep ----------------------------------------------------------------------------------

    def start_upkeep(self) -> None:
        """Watch idle times and memory until `close`."""
        self._upkeep = asyncio.create_task(self._keep_up())

    async def _keep_up(self) -> None:
        while True:
            self.check()
            await asyncio.sleep(UPKEEP_S)

    def check(self) -> None:
        """Unload models that were idle for too long, or whose memory has grown too much."""
        for model in self._by_last_use(lambda each: each.is_idle):
            limit_s = model.idle_limit_s
            if limit_s is not None and self.clock() - model.last_used_s >= limit_s:
                log.info("unloading %s, which is idle", model.name)
                self._start_unload(model)
        for model in self._models.values():
            self._measure(model)
        if self.max_bytes is None:
            return
        is_leaving = any(each.unloading is not None for each in self._models.values())
        if self.used_bytes > self.max_bytes and not is_leaving and not self._turn.locked():
            for model in self._by_last_use(lambda each: each.is_idle)[:1]:
                log.info("unloading %s, because the models' memory has grown", model.name)
                self._start_unload(model)

    def _measure(self, model: PooledModel) -> None:
        pid = model.runtime.supervisor.pid
        if pid is not None and model.is_loaded:
            model.measured_bytes = self._usage_of(pid).resident_bytes

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _wait_for_change(self) -> None:
        """Also return after a while, because turns without a request end unnoticed."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), UPKEEP_S)

    async def close(self) -> None:
        """Cancel loads, and stop all models. They write their state to disk at the same time."""
        if self._upkeep is not None:
            self._upkeep.cancel()
        loads = {model.loading for model in self._models.values() if model.loading is not None}
        for load in loads:
            load.cancel()
        if loads:
            await asyncio.wait(loads)
        await _stop_all(model.runtime for model in self._models.values())


class ModelBusy(BadRequest):
    status, code = 409, "model_busy"

    def __init__(self, name: str) -> None:
        super().__init__(
            f"The model {name} is answering requests: try again when they have ended.",
            param="model",
        )


async def _stop_all(runtimes: Iterable[RuntimeClient]) -> None:
    await asyncio.gather(*(runtime.stop() for runtime in runtimes))


async def _in_thread(work: Callable[[], T]) -> T:
    """Run work that may download, in a thread for which a stopping server does not wait."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def settle(set_result: Callable[[Any], None], value: Any) -> None:
        if not result.done():
            set_result(value)

    def run() -> None:
        try:
            outcome: tuple[Callable[[Any], None], Any] = (result.set_result, work())
        except Exception as error:
            outcome = (result.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the server has stopped
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=run, name="prepare", daemon=True).start()
    return await result


def _without_folders(error: Exception) -> str:
    """The text of an error for clients, whom the folders of the operator do not concern."""
    return re.sub(r"(?<![\w.:/])/(?:[^\s/:'\"]+/)+", "", str(error))


def _megabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.0f} MB"
