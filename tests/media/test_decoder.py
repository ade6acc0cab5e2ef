"""Real decoder processes: a process that dies or hangs costs only its own request."""

from __future__ import annotations

import asyncio
import base64
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import uvloop

from rekindle.errors import BadMedia
from rekindle.media.decoder import Decoder, DecoderProcess
from rekindle.media.document import tiny_pdf
from rekindle.media.jobs import Decoded, Frame, FrameSampling, MediaJob, Sizing
from tests.media.files import clip, plain, png, saved

PATIENCE_S = 60.0
IMAGE = MediaJob(saved(plain()), False, Sizing(2048))
SIZE = [(30, 20)]


#: The server uses uvloop; programs that embed it use asyncio.
LOOPS = {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}


class WithDecoder:
    """Runs work with a decoder of one process."""

    def __init__(self, loop: str) -> None:
        self._loop = loop

    def __call__(self, work: Callable[[Decoder], Awaitable[None]], **options: float) -> None:
        with asyncio.Runner(loop_factory=LOOPS[self._loop]) as runner:
            runner.run(self._run(work, Decoder(processes=1, **options)))

    async def _run(self, work: Callable[[Decoder], Awaitable[None]], decoder: Decoder) -> None:
        try:
            async with asyncio.timeout(PATIENCE_S):
                await work(decoder)
        finally:
            await decoder.close()


@pytest.fixture
def with_decoder() -> WithDecoder:
    return WithDecoder("uvloop")


@pytest.fixture(params=LOOPS)
def on_either_loop(request: pytest.FixtureRequest) -> WithDecoder:
    return WithDecoder(request.param)


def sizes(frames: list[Frame]) -> list[tuple[int, int]]:
    return [(frame.width, frame.height) for frame in frames]


async def decode(decoder: Decoder, job: MediaJob = IMAGE) -> list[tuple[int, int]]:
    return sizes(await decoder.decode(job, b""))


def only_child(decoder: Decoder) -> int:
    [process] = decoder._idle
    return process.pid


def children() -> set[int]:
    """The child processes of this process."""
    return set(map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()))


async def new_child(before: set[int]) -> int:
    while not (found := children() - before):
        await asyncio.sleep(0)
    [child] = found
    return child


def test_one_process_decodes_many_files(with_decoder: WithDecoder) -> None:
    async def work(decoder: Decoder) -> None:
        assert await decode(decoder) == SIZE
        first = only_child(decoder)
        text = MediaJob(base64.b64encode(IMAGE.data), True, Sizing(2048, (5, 6)))
        assert await decode(decoder, text) == [(5, 6)]
        video = MediaJob(clip(), False, Sizing(768), FrameSampling(1.0, 16))
        assert await decode(decoder, video) == [(64, 48)] * 4
        assert only_child(decoder) == first

    with_decoder(work)


def test_documents_are_read_by_a_process_of_their_own(with_decoder: WithDecoder) -> None:
    async def work(decoder: Decoder) -> None:
        pdf = MediaJob(tiny_pdf("Hello"), False, Sizing(1), is_document=True)
        text = MediaJob(base64.b64encode(b"plain"), True, Sizing(1), is_document=True)
        assert await decoder.extract(pdf, b"") == "Hello"
        assert await decode(decoder) == SIZE
        assert await decoder.extract(text, b"") == "plain"
        with pytest.raises(BadMedia, match="damaged"):
            await decoder.extract(MediaJob(b"%PDF-1.7", False, Sizing(1), is_document=True), b"")
        assert await decoder.extract(pdf, b"") == "Hello"

    with_decoder(work)


def test_an_image_does_not_wait_for_videos() -> None:
    """Videos use at most one of the processes."""

    class Held(Decoder):
        """Videos last until `let_go` is set."""

        def __init__(self) -> None:
            super().__init__(processes=2)
            self.let_go = asyncio.Event()

        async def _run(self, process: DecoderProcess, job: MediaJob) -> Decoded:
            if job.sampling:
                await self.let_go.wait()
            return await super()._run(process, job)

    async def work() -> None:
        decoder = Held()
        video = MediaJob(clip(frames=1), False, Sizing(768), FrameSampling(1.0, 1))
        videos = [asyncio.create_task(decode(decoder, video)) for _ in range(4)]
        async with asyncio.timeout(PATIENCE_S):
            assert await decode(decoder) == SIZE
            decoder.let_go.set()
            assert await asyncio.gather(*videos) == [[(64, 48)]] * 4
        await decoder.close()

    asyncio.run(work())


def test_an_invalid_file_does_not_cost_the_process(
    with_decoder: WithDecoder,
) -> None:
    async def work(decoder: Decoder) -> None:
        await decode(decoder)
        first = only_child(decoder)
        for data in (b"<svg/>", IMAGE.data[:40], png(30_000, 30_000, b"")):
            with pytest.raises(BadMedia):
                await decode(decoder, MediaJob(data, False, Sizing(2048)))
        assert await decode(decoder) == SIZE
        assert only_child(decoder) == first

    with_decoder(work)


@pytest.mark.parametrize("noticed", [False, True])
def test_a_process_killed_while_idle_is_replaced_unnoticed(
    noticed: bool, on_either_loop: WithDecoder
) -> None:
    async def work(decoder: Decoder) -> None:
        await decode(decoder)
        [process] = decoder._idle
        os.kill(process.pid, signal.SIGKILL)
        while noticed and process.is_running:
            await asyncio.sleep(0)
        assert await decode(decoder) == SIZE

    on_either_loop(work)


def test_decoder_processes_ignore_ctrl_c(with_decoder: WithDecoder) -> None:
    """It reaches every process of the terminal, but requests in flight need the decoder."""

    async def work(decoder: Decoder) -> None:
        await decode(decoder)
        first = only_child(decoder)
        os.kill(first, signal.SIGINT)
        os.kill(first, signal.SIGTERM)
        assert await decode(decoder) == SIZE
        assert only_child(decoder) == first

    with_decoder(work)


def test_a_crash_fails_only_its_own_request(on_either_loop: WithDecoder) -> None:
    async def work(decoder: Decoder) -> None:
        before = children()
        crashing = asyncio.create_task(decode(decoder))
        os.kill(await new_child(before), signal.SIGSEGV)
        waiting = asyncio.create_task(decode(decoder))
        with pytest.raises(BadMedia, match="made its decoder fail"):
            await crashing
        assert await waiting == SIZE

    on_either_loop(work)


def test_a_hang_fails_only_its_own_request(with_decoder: WithDecoder) -> None:
    async def work(decoder: Decoder) -> None:
        before = children()
        hanging = asyncio.create_task(decode(decoder))
        os.kill(await new_child(before), signal.SIGSTOP)
        with pytest.raises(BadMedia, match="takes more than 1 seconds"):
            await hanging
        assert decoder._idle == []

    with_decoder(work, image_s=1.0)


def test_a_cancelled_request_leaves_no_process_behind(on_either_loop: WithDecoder) -> None:
    async def work(decoder: Decoder) -> None:
        before = children()
        cancelled = asyncio.create_task(decode(decoder))
        child = await new_child(before)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        with pytest.raises(ProcessLookupError):
            os.kill(child, 0)
        assert await decode(decoder) == SIZE

    on_either_loop(work)


def test_a_process_has_limits_and_no_keys(
    monkeypatch: pytest.MonkeyPatch, with_decoder: WithDecoder
) -> None:
    monkeypatch.setenv("REKINDLE_API_KEY", "a-canary-key")

    async def work(decoder: Decoder) -> None:
        await decode(decoder)
        process = Path(f"/proc/{only_child(decoder)}")
        limits = {
            line[:25].strip(): line[25:].split()[0]
            for line in (process / "limits").read_text().splitlines()[1:]
        }
        assert 3 << 29 < int(limits["Max address space"]) < 3 << 30
        assert limits["Max open files"] == "3"
        assert limits["Max file size"] == "0"
        assert limits["Max core file size"] == "0"
        assert limits["Max cpu time"] != "unlimited"
        assert b"a-canary-key" not in (process / "environ").read_bytes()

    with_decoder(work)
