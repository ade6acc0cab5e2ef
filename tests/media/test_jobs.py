"""Messages between the front and a decoder process, which a hostile file may have taken over."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE

import msgspec
import pytest

from rekindle.media.decoder import DecoderDied, DecoderProcess
from rekindle.media.jobs import (
    LENGTH,
    LIMITS,
    Frame,
    FrameSampling,
    MediaJob,
    Result,
    Sizing,
    framed,
    read_job,
    read_result,
)


@pytest.mark.parametrize(
    "job",
    [
        MediaJob(b"x", True, Sizing(512)),
        MediaJob(b"x", False, Sizing(512, (1, 2)), FrameSampling(1.5, 8)),
    ],
)
def test_a_job_survives_the_round_trip(job: MediaJob) -> None:
    length, body = framed(job)
    assert LENGTH.unpack(length) == (len(body),)
    assert read_job(body) == job


@pytest.mark.parametrize("result", [[Frame(1, 2, b"123456", 0.5)], "why"])
def test_a_result_survives_the_round_trip(result: Result) -> None:
    assert read_result(framed(result)[1]) == result


INVALID = {
    "no msgpack": b"\xc1",
    "nothing": b"",
    "something else": msgspec.msgpack.encode([[1, 2]]),
    "pixels that do not fill the frame": framed([Frame(2, 2, b"x")])[1],
    "a negative size": framed([Frame(-1, -1, b"xxx")])[1],
}


@pytest.mark.parametrize("body", INVALID.values(), ids=INVALID)
def test_an_invalid_result_is_rejected(body: bytes) -> None:
    with pytest.raises(ValueError, match=r".*"):
        read_result(body)


@pytest.mark.parametrize(
    "sent", [LENGTH.pack(LIMITS.pixels * 4), LENGTH.pack(1) + b"\xc1", b"\0"], ids=len
)
def test_a_process_that_sends_garbage_counts_as_dead(sent: bytes) -> None:

    async def work() -> None:
        sends = f"sys.stdin.buffer.read(20); sys.stdout.buffer.write({sent!r})"
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", f"import sys; {sends}", stdin=PIPE, stdout=PIPE
        )
        decoder = DecoderProcess(process)
        with pytest.raises(DecoderDied):
            await decoder.run(MediaJob(bytes(64), False, Sizing(512)))
        await decoder.stop()

    asyncio.run(work())
