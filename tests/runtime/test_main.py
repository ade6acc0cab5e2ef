"""The process of a model survives slow work and ends on errors, as the front sees it."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from rekindle.errors import ModelError
from rekindle.protocol.admin import AdminReply, Tokenize, Tokenized
from rekindle.protocol.events import Event, Failed, Finished
from rekindle.protocol.requests import GenerateRequest, Stop, StructuredOutput
from rekindle.runtime.encode.threads import LARGE_BYTES
from rekindle.runtime.process import RuntimeProcess
from rekindle.worker import supervisor
from rekindle.worker.client import RuntimeClient
from tests.chat.grammar.costly import SLOW_TO_COMPILE, SLOW_TO_LOCATE
from tests.support.faulty_engine import ENDLESS, HANG, HUNG_READS, RAISE, write_model
from tests.support.tiny import WIDTH, write_llama
from tests.support.tiny_projector import write_llava_projector
from tests.worker.test_client import answer, ask, load, run, running, soon

pytestmark = pytest.mark.usefixtures("quick_restarts")


@pytest.fixture
def quick_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "RESTART_DELAYS_S", (0.01,))


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return write_model(tmp_path, monkeypatch)


@pytest.mark.parametrize("requires_vision", [False, True])
def test_an_unusable_projector_is_left_out_unless_it_was_requested(
    requires_vision: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_llama(tmp_path / "tiny.gguf")
    mmproj = write_llava_projector(tmp_path / "mmproj.gguf", width=WIDTH // 2)
    order = structs.replace(load(path), mmproj=str(mmproj), requires_vision=requires_vision)
    runtime = RuntimeClient("tiny", order, queue=2)

    async def scene() -> None:
        try:
            await runtime.start()
            assert runtime.loaded.modalities == ("text",)
            assert isinstance((await answer(runtime, ask("20 21")))[-1], Finished)
        finally:
            await runtime.stop()

    if requires_vision:
        with pytest.raises(ModelError, match=r"mmproj\.gguf is not a projector for tiny\.gguf"):
            run(scene)
        return
    run(scene)
    [warning] = [each.message for each in caplog.records if each.levelname == "WARNING"]
    assert "serving text without images: mmproj.gguf is not a projector for" in warning
    assert warning.endswith("Start with --no-vlm to silence this warning")


def test_replies_go_on_by_themselves_until_a_message_comes(model: Path) -> None:
    front, sock = socket.socketpair()
    with front, sock:
        process = RuntimeProcess(load(model), sock)
        scheduler = process._runtime.scheduler
        assert scheduler._is_undisturbed()
        process._deliver(AdminReply(1))  # is sent without waiting
        assert scheduler._is_undisturbed()
        process._inbox.put(Stop())
        assert not scheduler._is_undisturbed()
        process.run()
        process.close()


def begin(runtime: RuntimeClient, prompt: str) -> list[Event]:
    """Collect the events of a turn."""
    events: list[Event] = []
    runtime.submit(ask(prompt), lambda _choice, event: events.append(event))
    return events


def test_an_exception_on_the_engine_thread_ends_the_process_while_encoders_run(
    model: Path,
) -> None:
    async def scene() -> None:
        async with running(model) as runtime:
            encoding, raising = begin(runtime, ENDLESS), begin(runtime, RAISE)
            await soon(lambda: bool(encoding and raising))
            for failed in (encoding[-1], raising[-1]):
                assert isinstance(failed, Failed)
                assert (failed.error.status, failed.error.code) == (503, "model_restarting")
                assert "exit status 1" in failed.error.message
            await soon(lambda: runtime.supervisor.restarts == 1)
            assert isinstance((await answer(runtime, ask("20 21")))[-1], Finished)

    run(scene)


def test_a_process_with_a_stuck_engine_is_replaced(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "WATCH_INTERVAL_S", 0.05)

    async def scene() -> None:
        async with running(model, step_timeout_s=5.0) as runtime:
            assert runtime.ready is not None
            stuck = begin(runtime, HANG)
            await soon(lambda: runtime.ready is None)
            assert "no progress" in runtime.supervisor.down_reason
            await soon(lambda: any(isinstance(event, Failed) for event in stuck))
            assert isinstance(failed := stuck[-1], Failed)
            assert (failed.error.status, failed.error.code) == (503, "model_restarting")
            assert "made no progress" in failed.error.message
            await soon(lambda: runtime.supervisor.restarts == 1)
            assert runtime.supervisor.watchdog.fired == 1
            assert isinstance((await answer(runtime, ask("20 21")))[-1], Finished)

    run(scene)


def test_a_process_with_a_stuck_encoder_is_replaced(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other turns go on meanwhile, so only the encoder shows that something is wrong."""
    monkeypatch.setattr(supervisor, "WATCH_INTERVAL_S", 0.05)

    async def scene() -> None:
        async with running(model, step_timeout_s=5.0) as runtime:
            stuck = begin(runtime, large(ENDLESS))
            while runtime.ready is not None:
                events = await answer(runtime, ask("20 21", salt=b"others"))
                assert isinstance(events[-1], Finished | Failed)
                await asyncio.sleep(0.1)
            assert "no progress" in runtime.supervisor.down_reason
            await soon(lambda: any(isinstance(event, Failed) for event in stuck))
            assert isinstance(failed := stuck[-1], Failed)
            assert (failed.error.status, failed.error.code) == (503, "model_restarting")
            await soon(lambda: runtime.supervisor.restarts == 1)
            assert runtime.supervisor.watchdog.fired == 1
            assert isinstance((await answer(runtime, ask("20 21")))[-1], Finished)

    run(scene)


def constrained(schema: Any, salt: bytes) -> GenerateRequest:
    output = StructuredOutput(schema=schema)
    return ask("20 21", structured_output=output, salt=salt)


def problem_of(events: list[Event]) -> str:
    failed = events[-1]
    assert isinstance(failed, Failed)
    assert failed.error.status == 400
    return failed.error.message


def test_costly_schemas_of_a_tenant_do_not_delay_other_tenants(model: Path) -> None:
    """One takes seconds to compile. Another one has 57 kB, and took minutes to refuse."""

    async def scene() -> None:
        async with running(model, queue=20) as runtime:
            attack = [
                asyncio.create_task(answer(runtime, constrained(schema, b"attacker")))
                for schema in (SLOW_TO_COMPILE, SLOW_TO_LOCATE, SLOW_TO_LOCATE)
            ]
            for _ in range(3):
                finished = (await answer(runtime, ask("20 21", salt=b"other")))[-1]
                assert isinstance(finished, Finished)
                counted = await runtime.admin(Tokenize(text="20 21 22"), salt=b"other")
                assert isinstance(counted, Tokenized)
                own = await answer(runtime, constrained({"not": {}}, b"other"))
                assert problem_of(own) == "The schema uses `not`, which is not enforced: #."
            problems = [problem_of(await each) for each in attack]
            assert runtime.supervisor.restarts == 0
        located = "The schema uses `not`, which is not enforced: #/properties/odd."
        assert problems[1:] == [located, located]
        assert "takes too much time or memory" in problems[0]

    run(scene)


def test_cancelled_slow_prompts_do_not_delay_other_requests(model: Path) -> None:
    """There are more of them than encoders and queue places, and none finishes encoding."""

    async def scene() -> None:
        async with running(model, parallel=1, queue=3) as runtime:
            events: list[Event] = []
            for _ in range(40):
                await soon(lambda: runtime.turns < 4)
                for turn in runtime.submit(
                    ask(large(ENDLESS), salt=b"floods"), lambda _choice, event: events.append(event)
                ):
                    runtime.cancel(turn)
            others = ask("20 21", salt=b"others")
            assert isinstance((await answer(runtime, others))[-1], Finished)
            await soon(lambda: runtime.turns == 0)
            assert events == []

    run(scene)


def large(word: str) -> str:
    return word + " 20" * LARGE_BYTES


def test_an_otherwise_idle_process_gives_up_a_hanging_read(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only its own deadline wakes it."""
    prompt = " ".join(map(str, range(20, 60)))

    async def scene(reason: str) -> None:
        async with running(model, cache_dir=model.parent / "kv") as runtime:
            finished = (await answer(runtime, ask(prompt)))[-1]
            assert isinstance(finished, Finished)
            assert (finished.cache.reason, finished.cache.reused_tokens) == (reason, 0)

    run(lambda: scene("not_cached"))
    monkeypatch.setenv(HUNG_READS, "1")
    run(lambda: scene("fetch_timeout"))
