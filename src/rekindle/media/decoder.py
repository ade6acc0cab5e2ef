"""Decoding outside of the front: a few processes, each ended and replaced when a file is too much
for it, so that such a file costs its own request alone."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process

from rekindle.fair_queue import FairSlots
from rekindle.media.errors import BadMedia
from rekindle.media.jobs import (
    LENGTH,
    MOST_RESULT_BYTES,
    Frame,
    Job,
    Undecodable,
    VideoJob,
    framed,
    read_result,
)

PROCESSES = 2
IMAGE_S = 15.0  # a slow machine decodes the largest picture in a fifth of it
VIDEO_S = 45.0
#: What a process needs of the environment to start; it gets no keys.
NEEDED = (
    "PATH",
    "HOME",
    "LANG",
    "LC_ALL",
    "TMPDIR",
    "SYSTEMROOT",
    "VIRTUAL_ENV",
    "LD_LIBRARY_PATH",
)


class DecoderDied(Exception):
    """The process ended in the middle of a job, or does not answer as it should."""


class DecoderProcess:
    """One process; it does one job at a time."""

    def __init__(self, process: Process) -> None:
        self._process = process

    @classmethod
    async def spawn(cls) -> DecoderProcess:
        """Start one; whoever gives up meanwhile leaves none behind."""
        starting = asyncio.create_task(_start())
        try:
            return cls(await asyncio.shield(starting))
        except asyncio.CancelledError:
            await cls(await starting).stop()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.returncode is None

    async def run(self, job: Job) -> list[Frame]:
        """Raises BadMedia when the file is at fault, DecoderDied when the process is gone."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if self._process.stdin.is_closing():  # uvloop raises, where asyncio would only log
            raise DecoderDied
        try:
            self._process.stdin.writelines(framed(job))
            await self._process.stdin.drain()
            result = read_result(await _message(self._process.stdout))
        except (asyncio.IncompleteReadError, ConnectionError, ValueError):
            raise DecoderDied from None
        if isinstance(result, Undecodable):
            raise BadMedia(result.reason)
        return result.frames

    async def stop(self) -> None:
        if self.is_running:
            self._process.kill()
        await self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()


async def _message(stream: asyncio.StreamReader) -> bytes:
    [length] = LENGTH.unpack(await stream.readexactly(LENGTH.size))
    if length > MOST_RESULT_BYTES:
        raise ValueError("longer than any result")
    return await stream.readexactly(length)


async def _start() -> Process:
    kept = (name for name in os.environ if name in NEEDED or name.startswith("PYTHON"))
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "rekindle.media.worker",
        stdin=PIPE,
        stdout=PIPE,
        stderr=DEVNULL,
        env={name: os.environ[name] for name in kept} | {"OPENBLAS_NUM_THREADS": "1"},
    )


class Decoder:
    """The processes, started when they are needed."""

    def __init__(self, *, processes: int = PROCESSES, image_s: float = IMAGE_S) -> None:
        self._slots = FairSlots(processes)
        self._videos = FairSlots(1)  # they take long, and pictures do not wait for them
        self._idle: list[DecoderProcess] = []
        self._image_s = image_s

    async def close(self) -> None:
        """End the processes that are idle; the others end with their jobs."""
        idle, self._idle = self._idle, []
        for process in idle:
            await process.stop()

    async def decode(self, job: Job, tenant: bytes) -> list[Frame]:
        """The pictures of a file; raises BadMedia."""
        if isinstance(job, VideoJob):
            async with self._videos.slot(tenant):
                return await self._decode(job, tenant)
        return await self._decode(job, tenant)

    async def _decode(self, job: Job, tenant: bytes) -> list[Frame]:
        async with self._slots.slot(tenant):
            while self._idle:
                try:
                    return await self._run(self._idle.pop(), job)
                except DecoderDied:  # perhaps it was ended while it was idle
                    continue
            try:
                return await self._run(await DecoderProcess.spawn(), job)
            except DecoderDied:
                raise BadMedia(
                    "The file made its decoder fail, so it was not used. If it is not damaged, "
                    "send it in another format."
                ) from None

    async def _run(self, process: DecoderProcess, job: Job) -> list[Frame]:
        limit_s = VIDEO_S if isinstance(job, VideoJob) else self._image_s
        is_well = False
        try:
            async with asyncio.timeout(limit_s):
                frames = await process.run(job)
            is_well = True
            return frames
        except BadMedia:
            is_well = True
            raise
        except TimeoutError:
            raise BadMedia(
                f"Decoding the file takes more than {limit_s:g} seconds. Send a smaller one."
            ) from None
        finally:
            if is_well:
                self._idle.append(process)
            else:
                await process.stop()
