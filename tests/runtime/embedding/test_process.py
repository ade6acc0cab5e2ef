"""An embedding model in a process of its own, as the front sees it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rekindle.errors import ModelError, ReportedError
from rekindle.protocol.admin import CollectExpired, GetStats, Stats
from rekindle.protocol.events import Embedded, Failed, Started
from rekindle.protocol.requests import EmbedRequest, LoadModel
from rekindle.protocol.settings import RuntimeSettings
from rekindle.worker import supervisor
from rekindle.worker.client import RuntimeClient
from tests.support.tiny_bert import WIDTH, write_bert
from tests.worker.test_client import PATIENCE_S, run, soon


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bert(tmp_path_factory.mktemp("model") / "bert.gguf")


@asynccontextmanager
async def running(path: Path) -> AsyncIterator[RuntimeClient]:
    load = LoadModel(path=str(path), is_embedder=True, settings=RuntimeSettings(threads=1))
    runtime = RuntimeClient("bert", load, queue=8)
    try:
        await runtime.start()
        yield runtime
    finally:
        await runtime.stop()


async def embed(runtime: RuntimeClient, *inputs: str) -> Embedded:
    async with asyncio.timeout(PATIENCE_S):
        events = [event async for event in runtime.stream(EmbedRequest(inputs=list(inputs)))]
    assert isinstance(events[0], Started)
    assert isinstance(events[-1], Embedded)
    return events[-1]


def test_a_process_embeds_counts_and_rejects_requests_about_conversations(model: Path) -> None:
    async def scene() -> None:
        async with running(model) as runtime:
            assert runtime.ready is not None
            assert (runtime.ready.dimensions, runtime.ready.ranks) == (WIDTH, False)
            first, again = [await embed(runtime, "the cat", "a dog") for _ in range(2)]
            assert first.vectors == again.vectors
            assert (first.reused_tokens, again.reused_tokens) == (0, again.prompt_tokens)
            stats = await runtime.admin(GetStats(), salt=b"")
            assert isinstance(stats, Stats)
            assert (stats.hits, stats.misses, stats.active_turns) == (1, 1, 0)
            with pytest.raises(ReportedError, match="keeps no conversations"):
                await runtime.admin(CollectExpired(), salt=b"")
            long = EmbedRequest(inputs=["the " * 200])
            [failed] = [event async for event in runtime.stream(long)]
            assert isinstance(failed, Failed)
            assert failed.error.code == "context_length_exceeded"

    run(scene)


def test_a_killed_process_fails_its_requests_and_is_restarted(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "RESTART_DELAYS_S", (0.01,))

    async def scene() -> None:
        async with running(model) as runtime:
            assert runtime.supervisor.pid is not None
            os.kill(runtime.supervisor.pid, signal.SIGSTOP)  # it must not answer before it dies
            asked = asyncio.ensure_future(anext(runtime.stream(EmbedRequest(inputs=["the cat"]))))
            await asyncio.sleep(0)
            os.kill(runtime.supervisor.pid, signal.SIGKILL)
            failed = await asked
            assert isinstance(failed, Failed)
            assert failed.error.code == "model_restarting"
            await soon(lambda: runtime.supervisor.restarts == 1)
            assert await embed(runtime, "the cat")

    run(scene)


def test_a_cancelled_request_frees_its_place(model: Path) -> None:
    async def scene() -> None:
        async with running(model) as runtime:
            request = EmbedRequest(inputs=[f"the cat {'a' * n}" for n in range(100)])
            [turn] = runtime.submit(request, lambda _choice, _event: None)
            runtime.cancel(turn)
            await soon(lambda: runtime.turns == 0)
            assert await embed(runtime, "the dog")

    run(scene)


def test_an_invalid_model_file_is_reported_with_a_clear_error(tmp_path: Path) -> None:
    async def scene() -> None:
        path = tmp_path / "page.gguf"
        path.write_text("<html>")
        with pytest.raises(ModelError, match="damaged"):
            async with running(path):
                pass

    run(scene)
