"""Which models are loaded, with runtimes that load at a word."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from rekindle.errors import ModelError, ModelLoadFailed, Unavailable
from rekindle.protocol.frames import Ready
from rekindle.protocol.requests import LoadModel
from rekindle.protocol.settings import RuntimeSettings
from rekindle.worker import pool as pool_module
from rekindle.worker.client import RuntimeClient
from rekindle.worker.pool import (
    FOREVER,
    LoadCancelled,
    LoadPolicy,
    ModelBusy,
    ModelPool,
    PreparedLoad,
)
from rekindle.worker.usage import ProcessUsage

PATIENCE_S = 30.0


class Loadable(RuntimeClient):
    """Loads when the test allows it, and records what happens to it."""

    def __init__(self, name: str, diary: list[str], *, waits: bool = False) -> None:
        self.order = LoadModel(path=f"/models/{name}.gguf", settings=RuntimeSettings())
        super().__init__(name, self.order, queue=0)
        self.diary = diary
        self.may_load = asyncio.Event()
        self.open_turns = 0
        self.loads_fail = 0
        if not waits:
            self.may_load.set()

    @property
    def is_busy(self) -> bool:
        return self.open_turns > 0

    async def start(
        self, on_loading: Callable[[float], None] = lambda _done: None, load: Any = None
    ) -> None:
        self.diary.append(f"load {self.name}")
        on_loading(0.5)
        await self.may_load.wait()
        if self.loads_fail:
            self.loads_fail -= 1
            raise ModelError("/srv/models/one.gguf is damaged, see https://host/a/b")
        self.supervisor.ready = Ready(context_tokens=64, pool_tokens=64)

    async def stop(self, reason: str = "") -> None:
        self.supervisor.ready = None
        await asyncio.sleep(0)
        self.diary.append(f"unload {self.name}")


class Bench:
    """A pool on a clock that the test moves, with models of 10 bytes each."""

    def __init__(self, max_bytes: int | None = None) -> None:
        self.now_s = 100.0
        self.diary: list[str] = []
        self.pool = ModelPool(max_bytes, lambda: self.now_s, lambda _pid: ProcessUsage(0, 0.0))
        self.runtimes: dict[str, Loadable] = {}

    def add(self, name: str, *, size: int = 10, waits: bool = False, **policy: Any) -> Loadable:
        runtime = Loadable(name, self.diary, waits=waits)
        prepared = PreparedLoad(runtime.order, size)
        self.pool.add(runtime, LoadPolicy(prepare=lambda: prepared, **policy))
        self.runtimes[name] = runtime
        return runtime

    def status(self, name: str) -> str:
        return self.pool.model(self.runtimes[name]).status

    async def use(self, name: str) -> None:
        async with self.pool.use(self.runtimes[name]):
            assert self.status(name) == "loaded"
        self.now_s += 1


def run(scene: Callable[[], Awaitable[None]]) -> None:
    async def play() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await scene()

    asyncio.run(play())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def test_two_requests_for_an_unloaded_model_load_it_once() -> None:
    async def scene() -> None:
        bench = Bench()
        one = bench.add("one", waits=True)
        users = [asyncio.create_task(bench.use("one")) for _ in range(2)]
        await until(lambda: bench.status("one") == "loading" and bench.diary != [])
        assert bench.pool.model(one).fraction == 0.5
        one.may_load.set()
        await asyncio.gather(*users)
        assert bench.diary == ["load one"]

    run(scene)


def test_the_least_recently_used_model_makes_room() -> None:
    async def scene() -> None:
        bench = Bench(max_bytes=25)
        for name in ("one", "two", "three"):
            bench.add(name)
        for name in ("one", "two", "one", "three", "two"):
            await bench.use(name)
            assert bench.pool.used_bytes <= 25
        assert bench.diary == [
            *("load one", "load two", "unload two", "load three"),
            *("unload one", "load two"),
        ]

    run(scene)


def test_a_model_with_requests_or_running_turns_is_never_unloaded_for_another_one() -> None:
    async def scene() -> None:
        bench = Bench(max_bytes=15)
        one, _ = bench.add("one"), bench.add("two")
        await bench.use("one")
        one.open_turns = 1
        waiting = asyncio.create_task(bench.use("two"))
        await until(lambda: bench.status("two") == "loading")
        await asyncio.sleep(0.05)
        assert bench.diary == ["load one"]
        one.open_turns = 0
        async with bench.pool.use(one):
            bench.pool._notify()
            await asyncio.sleep(0.05)
            assert bench.diary == ["load one"]
        await waiting
        assert bench.diary == ["load one", "unload one", "load two"]

    run(scene)


def test_a_model_that_is_always_busy_gives_way_in_the_end() -> None:
    async def scene() -> None:
        bench = Bench(max_bytes=15)
        one, _ = bench.add("one"), bench.add("two")
        async with AsyncExitStack() as running:
            await running.enter_async_context(bench.pool.use(one))
            waiting = asyncio.create_task(bench.use("two"))
            await until(lambda: bench.status("two") == "loading")
            bench.now_s += pool_module.MAX_BUSY_S + 1
            bench.pool._notify()
            await until(lambda: bench.pool.model(one).is_retiring)
            late = asyncio.create_task(bench.use("one"))  # has to wait for the other model
            await until(lambda: bench.pool.model(one).waiters == 1)
        await waiting
        await late
        assert bench.diary == ["load one", "unload one", "load two", "unload two", "load one"]

    run(scene)


def test_pinned_models_stay_and_a_model_that_cannot_fit_is_refused() -> None:
    async def scene() -> None:
        bench = Bench(max_bytes=25)
        bench.add("pinned", keep_loaded=True, idle_unload_s=1.0)
        bench.add("small")
        bench.add("large", size=20)
        await bench.use("pinned")
        await bench.use("small")
        bench.now_s += 1000
        bench.pool.check()
        with pytest.raises(ModelLoadFailed, match="pinned models take"):
            await bench.use("large")
        assert bench.diary == ["load pinned", "load small"]

    run(scene)


def test_an_idle_model_is_unloaded_after_its_limit() -> None:
    async def scene() -> None:
        bench = Bench()
        one = bench.add("one", idle_unload_s=60.0)
        await bench.use("one")
        bench.now_s += 50
        bench.pool.check()
        assert bench.status("one") == "loaded"
        bench.now_s += 10
        bench.pool.check()
        await until(lambda: bench.status("one") == "unloaded")
        await bench.use("one")
        bench.pool.keep_alive(one, FOREVER)
        bench.now_s += 1000
        bench.pool.check()
        assert bench.status("one") == "loaded"
        bench.pool.keep_alive(one, 0.0)
        bench.pool.check()
        await until(lambda: bench.status("one") == "unloaded")

    run(scene)


def test_a_failed_load_answers_all_that_wait_and_is_tried_again_after_a_pause() -> None:
    async def scene() -> None:
        bench = Bench()
        one, _ = bench.add("one", waits=True), bench.add("two")
        await bench.use("two")
        one.loads_fail = 1
        users = [asyncio.create_task(bench.use("one")) for _ in range(2)]
        await until(lambda: "load one" in bench.diary)
        one.may_load.set()
        for outcome in await asyncio.gather(*users, return_exceptions=True):
            assert isinstance(outcome, ModelLoadFailed)
            assert ": one.gguf is damaged, see https://host/a/b." in str(outcome)
            assert outcome.retry_after_s == 1
        assert (bench.status("one"), bench.status("two")) == ("failed", "loaded")
        with pytest.raises(ModelLoadFailed):
            await bench.use("one")
        assert bench.diary.count("load one") == 1
        bench.now_s += 2
        await bench.use("one")
        assert bench.status("one") == "loaded"

    run(scene)


def test_unloading_a_model_that_loads_cancels_the_load() -> None:
    async def scene() -> None:
        bench = Bench()
        one = bench.add("one", waits=True)
        waiting = asyncio.create_task(bench.use("one"))
        await until(lambda: bench.diary == ["load one"])
        await bench.pool.unload(one)
        with pytest.raises(LoadCancelled):
            await waiting
        assert bench.status("one") == "unloaded"
        one.may_load.set()
        await bench.use("one")

    run(scene)


def test_a_load_that_has_not_begun_ends_when_nobody_waits_for_it() -> None:
    async def scene() -> None:
        bench = Bench(max_bytes=15)
        one, _ = bench.add("one"), bench.add("two")
        async with bench.pool.use(one):
            waiting = asyncio.create_task(bench.use("two"))
            await until(lambda: bench.pool._turn.locked())
            waiting.cancel()
            await until(lambda: bench.status("two") == "unloaded")
        bench.pool.check()
        assert bench.diary == ["load one"]

    run(scene)


def test_a_busy_model_is_not_unloaded_by_request() -> None:
    async def scene() -> None:
        bench = Bench()
        one = bench.add("one")
        async with bench.pool.use(one):
            with pytest.raises(ModelBusy):
                await bench.pool.unload(one)
        await bench.pool.unload(one)
        assert bench.status("one") == "unloaded"

    run(scene)


def test_a_model_that_grows_beyond_the_limit_makes_an_idle_one_go() -> None:
    async def scene() -> None:
        bench = Bench(max_bytes=25)
        one, two = bench.add("one"), bench.add("two")
        await bench.use("one")
        await bench.use("two")
        bench.pool.model(two).measured_bytes = 20
        bench.pool.check()
        await until(lambda: bench.pool.used_bytes == 20)
        assert bench.status("one") == "unloaded"
        await bench.pool.close()
        assert bench.diary[-2:] == ["unload one", "unload two"]
        assert one.ready is None

    run(scene)


def test_a_removed_model_fails_those_that_wait_for_it() -> None:
    async def scene() -> None:
        bench = Bench()
        one = bench.add("one", waits=True)
        waiting = asyncio.create_task(bench.use("one"))
        await until(lambda: bench.diary == ["load one"])
        await bench.pool.remove(one)
        with pytest.raises(Unavailable):
            await waiting
        with pytest.raises(KeyError):
            bench.pool.model(one)

    run(scene)


def test_several_busy_models_give_way_if_one_does_not_suffice() -> None:
    async def scene() -> None:
        bench = Bench(max_bytes=25)
        one, two, _ = bench.add("one"), bench.add("two"), bench.add("large", size=20)
        async with AsyncExitStack() as running:
            await running.enter_async_context(bench.pool.use(one))
            await running.enter_async_context(bench.pool.use(two))
            waiting = asyncio.create_task(bench.use("large"))
            await until(lambda: bench.status("large") == "loading")
            bench.now_s += pool_module.MAX_BUSY_S + 1
            bench.pool._notify()
            await until(lambda: bench.pool.model(one).is_retiring)
        await waiting
        assert bench.diary[2:] == ["unload one", "unload two", "load large"]

    run(scene)
