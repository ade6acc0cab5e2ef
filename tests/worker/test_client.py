"""A runtime process as the front sees it: a real process with a tiny model."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import uvloop
from msgspec import structs

from rekindle.errors import ModelError, TooManyRequests, Unavailable
from rekindle.protocol.admin import GetStats, Stats
from rekindle.protocol.events import Delta, Event, Failed, Finished, Started
from rekindle.protocol.requests import Choice, GenerateRequest, LoadModel, SamplingParams
from rekindle.protocol.settings import RuntimeSettings
from rekindle.worker import client, supervisor
from rekindle.worker.client import ModelFile, RuntimeClient
from tests.support.tiny import VOCABULARY, write_llama

CONTEXT = 2048
PATIENCE_S = 30.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("model") / "tiny.gguf", context=CONTEXT)


def load(path: Path, parallel: int = 2, cache_dir: Path | None = None) -> LoadModel:
    disk: dict[str, Any] = {"disk_cache": 0}
    if cache_dir is not None:
        disk = {"disk_cache": 1 << 26, "cache_dir": cache_dir}
    settings = RuntimeSettings(parallel=parallel, threads=1, ram_cache=1 << 26, **disk)
    return LoadModel(path=str(path), settings=settings)


def ask(prompt: str | list[int | str] = "hello", **fields: Any) -> GenerateRequest:
    sampling = fields.pop("sampling", SamplingParams(temperature=0))
    return GenerateRequest(turn=0, prompt=prompt, sampling=sampling, **{"max_tokens": 4, **fields})


def endless() -> GenerateRequest:
    return ask(max_tokens=None, ignore_eos=True)


@asynccontextmanager
async def running(
    path: Path,
    *,
    parallel: int = 2,
    queue: int = 8,
    step_timeout_s: float = 300.0,
    cache_dir: Path | None = None,
) -> AsyncIterator[RuntimeClient]:
    order = load(path, parallel, cache_dir)
    runtime = RuntimeClient("tiny", order, queue=queue, step_timeout_s=step_timeout_s)
    try:
        await runtime.start()
        yield runtime
    finally:
        await runtime.stop()


async def answer(runtime: RuntimeClient, request: GenerateRequest) -> list[Event]:
    async with asyncio.timeout(PATIENCE_S):
        return [event async for event in runtime.stream(request)]


async def soon(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.01)


def run(scene: Callable[[], Awaitable[None]]) -> None:
    async def play() -> None:
        await scene()

    asyncio.run(play())


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_a_turn_starts_generates_and_finishes(model: Path) -> None:
    async def scene() -> None:
        loaded: list[float] = []
        runtime = RuntimeClient("tiny", load(model), queue=0)
        assert runtime.ready is None
        await runtime.start(loaded.append)
        assert runtime.ready is not None
        assert runtime.ready.context_tokens == CONTEXT
        assert loaded == sorted(loaded)
        first, *texts, last = await answer(runtime, ask("hello", ignore_eos=True))
        assert isinstance(first, Started)
        assert first.prompt_tokens == 5
        assert all(isinstance(event, Delta) for event in texts)
        assert isinstance(last, Finished)
        assert (last.reason, last.completion_tokens) == ("length", 4)
        assert runtime.turns == 0
        await runtime.stop()

    run(scene)


def test_each_choice_of_a_request_is_a_turn_that_ends(model: Path) -> None:
    async def scene() -> None:
        async with running(model, parallel=4) as runtime:
            events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
            choices = [Choice(seed=2), Choice(seed=3)]
            sampling = SamplingParams(temperature=1.0, seed=1)
            request = ask(more_choices=choices, sampling=sampling, ignore_eos=True)
            turns = runtime.submit(request, lambda *event: events.put_nowait(event))
            ended: list[int] = []
            async with asyncio.timeout(PATIENCE_S):
                while len(ended) < 3:
                    choice, event = await events.get()
                    assert event.turn == turns[choice]
                    ended += [choice] if isinstance(event, Finished) else []
            assert sorted(ended) == [0, 1, 2]
            assert runtime.turns == 0

    run(scene)


def test_choices_that_cannot_be_encoded_all_fail(model: Path) -> None:
    async def scene() -> None:
        async with running(model) as runtime:
            failed: asyncio.Queue[Event] = asyncio.Queue()
            request = ask([5] * CONTEXT, more_choices=[Choice()])
            turns = runtime.submit(request, lambda _choice, event: failed.put_nowait(event))
            async with asyncio.timeout(PATIENCE_S):
                found = [await failed.get(), await failed.get()]
            assert all(isinstance(event, Failed) for event in found)
            assert {event.turn for event in found} == set(turns)

    run(scene)


def test_a_request_with_more_choices_than_places_is_refused(model: Path) -> None:
    async def scene() -> None:
        async with running(model, parallel=1, queue=1) as runtime:
            with pytest.raises(TooManyRequests):
                runtime.submit(ask(more_choices=[Choice()] * 2), lambda _choice, _event: None)
            assert runtime.turns == 0
            assert isinstance((await answer(runtime, ask()))[-1], Finished)

    run(scene)


def test_a_cancelled_turn_frees_its_place(model: Path) -> None:
    async def scene() -> None:
        async with running(model, parallel=1, queue=0) as runtime:
            for _ in range(3):
                async with aclosing(runtime.stream(endless())) as events:
                    assert isinstance(await anext(events), Started)
                assert runtime.turns == 0
            assert isinstance((await answer(runtime, ask()))[-1], Finished)

    run(scene)


def test_a_turn_that_cannot_be_sent_takes_no_place(model: Path) -> None:
    async def scene() -> None:
        async with running(model, parallel=1, queue=0) as runtime:
            with pytest.raises(OverflowError):  # msgpack cannot encode this number
                runtime.submit(ask([2**64]), lambda _choice, _event: None)
            assert runtime.turns == 0
            assert isinstance((await answer(runtime, ask()))[-1], Finished)

    run(scene)


def test_turns_beyond_the_queue_are_refused_immediately(model: Path) -> None:
    async def scene() -> None:
        async with running(model, parallel=1, queue=1) as runtime:
            async with aclosing(runtime.stream(endless())) as busy:
                await anext(busy)
                waiting = asyncio.create_task(answer(runtime, ask()))
                await soon(lambda: runtime.turns == 2)
                with pytest.raises(TooManyRequests, match="2 requests"):
                    await answer(runtime, ask())
            assert isinstance((await waiting)[-1], Finished)
            assert isinstance((await answer(runtime, ask()))[-1], Finished)

    run(scene)


def flood(runtime: RuntimeClient) -> None:
    for _ in range(16):
        [turn] = runtime.submit(ask("x" * (1 << 20)), lambda _choice, _event: None)
        runtime.cancel(turn)


def test_unread_requests_are_limited_in_memory(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of disconnected clients count too: their place is free, but they are unsent."""
    monkeypatch.setattr(client, "MAX_UNSENT_BYTES", 1 << 20)

    async def scene() -> None:
        async with running(model) as runtime:
            assert runtime.supervisor.pid is not None
            os.kill(runtime.supervisor.pid, signal.SIGSTOP)
            with pytest.raises(Unavailable, match="behind with reading"):
                flood(runtime)
            os.kill(runtime.supervisor.pid, signal.SIGCONT)
            await soon(lambda: runtime.supervisor.process.unsent_bytes == 0)  # type: ignore[union-attr]
            assert isinstance((await answer(runtime, ask()))[-1], Finished)

    run(scene)


def test_a_tenant_that_fills_the_queue_makes_room_for_another(model: Path) -> None:
    async def scene() -> None:
        async with running(model, parallel=1, queue=3) as runtime:
            async with aclosing(runtime.stream(endless())) as busy:
                await anext(busy)
                waiting = [asyncio.create_task(answer(runtime, ask())) for _ in range(3)]
                await soon(lambda: runtime.turns == 4)
                other = [asyncio.create_task(answer(runtime, ask(salt=b"other"))) for _ in range(2)]
                async with asyncio.timeout(PATIENCE_S):
                    [[refused], [refused_too]] = await asyncio.gather(*waiting[1:])
                for failed in (refused, refused_too):
                    assert isinstance(failed, Failed)
                    assert (failed.error.status, failed.error.code) == (429, "queue_full")
                with pytest.raises(TooManyRequests):
                    await answer(runtime, ask(salt=b"other"))  # this tenant has its share
            for task in (waiting[0], *other):
                assert isinstance((await task)[-1], Finished)
            await soon(lambda: runtime.turns == 0)

    run(scene)


def test_unanswered_admin_requests_per_tenant_are_limited(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "MAX_ADMIN_REQUESTS", 2)

    async def scene() -> None:
        async with running(model) as runtime:
            asked = [asyncio.create_task(runtime.admin(GetStats(), salt=b"")) for _ in range(2)]
            await asyncio.sleep(0)  # they are sent, but no reply has been read
            asked[0].cancel()
            with pytest.raises(TooManyRequests, match="2 requests about cache or tokens"):
                await runtime.admin(GetStats(), salt=b"")
            assert isinstance(await runtime.admin(GetStats(), salt=b"other"), Stats)
            assert isinstance(await asked[1], Stats)
            assert isinstance(await runtime.admin(GetStats(), salt=b""), Stats)

    run(scene)


def test_a_request_to_a_process_that_has_just_died_fails(
    model: Path,
) -> None:
    """Run on uvloop, whose closed transports raise."""

    async def scene() -> None:
        async with running(model) as runtime:
            process, ended = runtime.supervisor.process, asyncio.Queue[Event]()
            assert process is not None
            process._transport.abort()
            await soon(process._transport.is_closing)
            runtime.submit(ask(), lambda _choice, event: ended.put_nowait(event))
            async with asyncio.timeout(PATIENCE_S):
                failed = await ended.get()
            assert isinstance(failed, Failed)
            assert failed.error.status == 503

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scene())


@pytest.mark.parametrize(
    ("request_", "code", "param"),
    [
        (ask([5] * CONTEXT), "context_length_exceeded", "prompt"),
        (ask([VOCABULARY]), "invalid_value", "prompt"),
        (ask([2**63]), "invalid_value", "prompt"),
        (ask(sampling=SamplingParams(logit_bias={10**9: 1.0})), "invalid_value", "logit_bias"),
    ],
    ids=["too long", "no such token", "huge token", "bias"],
)
def test_an_invalid_turn_ends_with_one_failure(
    model: Path, request_: GenerateRequest, code: str, param: str
) -> None:
    async def scene() -> None:
        async with running(model) as runtime:
            [failed] = await answer(runtime, request_)
            assert isinstance(failed, Failed)
            assert (failed.error.status, failed.error.code, failed.error.param) == (
                400,
                code,
                param,
            )
            assert isinstance((await answer(runtime, ask()))[-1], Finished)

    run(scene)


def test_a_killed_process_fails_its_turns_and_is_restarted(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "RESTART_DELAYS_S", (0.01,))

    async def scene() -> None:
        async with running(model) as runtime:
            first_pid = runtime.supervisor.pid
            assert first_pid is not None
            async with asyncio.timeout(PATIENCE_S), aclosing(runtime.stream(endless())) as events:
                assert isinstance(await anext(events), Started)
                os.kill(first_pid, signal.SIGKILL)
                last = [event async for event in events][-1]
            assert isinstance(last, Failed)
            assert (last.error.status, last.error.code) == (503, "model_restarting")
            with pytest.raises(Unavailable):
                await answer(runtime, ask())
            assert (
                runtime.supervisor.down_reason
                == "the process of a model died and is being restarted"
            )
            await soon(lambda: runtime.ready is not None)
            assert runtime.supervisor.restarts == 1
            assert runtime.supervisor.pid != first_pid
            assert isinstance((await answer(runtime, ask()))[-1], Finished)

    run(scene)


def test_a_process_killed_repeatedly_is_restarted_each_time(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "RESTART_DELAYS_S", (0.01,))

    async def scene() -> None:
        async with running(model) as runtime:
            for deaths in (1, 2):
                assert runtime.supervisor.pid is not None
                os.kill(runtime.supervisor.pid, signal.SIGKILL)
                await soon(lambda expected=deaths: runtime.supervisor.restarts == expected)  # type: ignore[misc]
            assert isinstance((await answer(runtime, ask()))[-1], Finished)

    run(scene)


def test_a_runtime_process_ignores_ctrl_c(model: Path) -> None:
    async def scene() -> None:
        async with running(model) as runtime:
            assert runtime.supervisor.pid is not None
            os.kill(runtime.supervisor.pid, signal.SIGINT)
            assert isinstance((await answer(runtime, ask()))[-1], Finished)

    run(scene)


def test_stopping_ends_the_process_even_during_a_turn(model: Path) -> None:
    async def scene() -> None:
        async with running(model) as runtime:
            pid = runtime.supervisor.pid
            assert pid is not None
            async with aclosing(runtime.stream(endless())) as events:
                await anext(events)
                await runtime.stop()
                assert not is_alive(pid)
            await runtime.stop()

    run(scene)


def damage(whole: bytes) -> dict[str, bytes]:
    return {
        "empty": b"",
        "text": b"not a model at all",
        "magic alone": whole[:4],
        "header cut": whole[:100],
        "tensors cut": whole[: len(whole) // 2],
        "header zeroed": whole[:8] + bytes(64) + whole[72:],
    }


@pytest.mark.parametrize("kind", damage(b""))
def test_a_damaged_file_is_a_model_error(model: Path, kind: str, tmp_path: Path) -> None:
    path = tmp_path / "damaged.gguf"
    path.write_bytes(damage(model.read_bytes())[kind])

    async def scene() -> None:
        with pytest.raises(ModelError):
            async with running(path):
                pass

    run(scene)


@pytest.mark.parametrize(
    ("formats", "refusal"),
    [
        ({"tool_format": "hermess"}, "'hermess': use auto, or one of deepseek, .*, qwen3-coder$"),
        ({"reasoning_format": "thinks"}, "'thinks': use auto, or one of think, .*, none$"),
    ],
)
def test_an_unknown_format_is_rejected_before_the_model_is_loaded(
    formats: dict[str, Any], refusal: str, tmp_path: Path
) -> None:
    """The model file does not exist, so loading would fail with another error."""
    order = load(tmp_path / "missing.gguf")
    order = structs.replace(order, settings=replace(order.settings, **formats))

    async def scene() -> None:
        runtime = RuntimeClient("tiny", order, queue=1)
        with pytest.raises(ModelError, match=refusal):
            await runtime.start()
        await runtime.stop()

    run(scene)


def test_a_missing_file_is_a_model_error(tmp_path: Path) -> None:
    async def scene() -> None:
        with pytest.raises(ModelError):
            async with running(tmp_path / "missing.gguf"):
                pass

    run(scene)


def test_the_process_ends_when_the_front_is_killed(model: Path) -> None:
    script = (
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from tests.worker.test_client import running\n"
        "async def main():\n"
        "    async with running(Path(sys.argv[1])) as runtime:\n"
        "        print(runtime.supervisor.pid, flush=True)\n"
        "        await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    command = [sys.executable, "-c", script, str(model)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as front:
        assert front.stdout is not None
        pid = int(front.stdout.readline())
        assert is_alive(pid)
        front.kill()

    async def scene() -> None:
        await soon(lambda: not is_alive(pid))

    run(scene)


async def _stopped_in_mid_turn(model: Path) -> Event:
    async with running(model) as runtime:
        events = runtime.stream(endless())
        await anext(events)
        await runtime.stop()
        return [event async for event in events][-1]


def test_turns_in_flight_fail_when_the_runtime_stops(model: Path) -> None:
    last = asyncio.run(asyncio.wait_for(_stopped_in_mid_turn(model), PATIENCE_S))
    assert isinstance(last, Failed)
    assert last.error.status == 503
    assert "stopping" in last.error.message


async def _last_event(model: Path, question: GenerateRequest) -> Event:
    async with running(model) as runtime:
        return [event async for event in runtime.stream(question)][-1]


def test_an_empty_prompt_consists_of_the_bos_token(model: Path) -> None:
    last = asyncio.run(asyncio.wait_for(_last_event(model, ask("")), PATIENCE_S))
    assert isinstance(last, Finished)
    assert last.prompt_tokens == 1


def test_a_text_that_must_be_too_long_is_rejected_before_tokenising(model: Path) -> None:
    question = ask("x" * (CONTEXT * 1000))
    last = asyncio.run(asyncio.wait_for(_last_event(model, question), PATIENCE_S))
    assert isinstance(last, Failed)
    assert last.error.code == "context_length_exceeded"
    assert last.error.param == "prompt"
    assert "at least" in last.error.message


def test_a_model_file_has_a_format_and_a_size(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"12345")
    found = ModelFile.at(path)
    assert (found.format, found.size_bytes) == ("gguf", 5)
    assert found.modified_s == path.stat().st_mtime


def test_a_model_folder_has_the_format_of_its_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"{}")
    (tmp_path / "model.safetensors").write_bytes(b"12345")
    found = ModelFile.at(tmp_path)
    assert (found.format, found.size_bytes) == ("safetensors", 7)


def test_a_deleted_model_file_has_size_zero(tmp_path: Path) -> None:
    found = ModelFile.at(tmp_path / "model.gguf")
    assert (found.format, found.size_bytes, found.modified_s) == ("gguf", 0, 0.0)
