"""Decodes images, videos and documents in separate processes.

A process that crashes or hangs on a file is replaced, so a hostile file costs only its own request.
"""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from contextlib import nullcontext

from rekindle.errors import BadMedia
from rekindle.fair_queue import FairSlots
from rekindle.media.jobs import (
    DOCUMENTS,
    LENGTH,
    LIMITS,
    Decoded,
    Frame,
    MediaJob,
    Result,
    Text,
    framed,
    read_result,
)
from rekindle.protocol.requests import CHANNELS

#: The environment variables of a decoder process, in addition to Python's. It gets no API keys.
PASSED_VARIABLES = (
    "PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "SYSTEMROOT", "VIRTUAL_ENV", "LD_LIBRARY_PATH",
)  # fmt: skip


class DecoderDied(Exception):
    """The process ended during a job, or sent an invalid result."""


class DecoderProcess:
    """One process, which does one job at a time."""

    def __init__(self, process: Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._stdin, self._stdout = process, process.stdin, process.stdout

    @classmethod
    async def spawn(cls, *, documents: bool = False) -> DecoderProcess:
        """Start a process, for documents or for everything else. If the caller is cancelled
        meanwhile, the process is stopped."""
        starting = asyncio.create_task(_start(documents))
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

    async def run(self, job: MediaJob) -> Result:
        """Raises DecoderDied if the process is gone."""
        if self._stdin.is_closing():  # uvloop would raise; asyncio would only log
            raise DecoderDied
        try:
            self._stdin.writelines(framed(job))
            await self._stdin.drain()
            result = read_result(await _read_message(self._stdout))
            if isinstance(result, list if job.is_document else Text):
                raise ValueError("the result is of another kind of file")
            return result
        except (asyncio.IncompleteReadError, ConnectionError, ValueError):
            raise DecoderDied from None

    async def stop(self) -> None:
        if self.is_running:
            self._process.kill()
        await self._process.wait()
        self._stdin.close()


async def _read_message(stream: asyncio.StreamReader) -> bytes:
    [length] = LENGTH.unpack(await stream.readexactly(LENGTH.size))
    if length > max(LIMITS.pixels * CHANNELS, LIMITS.text_characters * 4) + (1 << 20):
        raise ValueError("the message is longer than any result")
    return await stream.readexactly(length)


async def _start(documents: bool) -> Process:
    names = (name for name in os.environ if name in PASSED_VARIABLES or name.startswith("PYTHON"))
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "rekindle.media.decoder_main",
        *([DOCUMENTS] if documents else []),
        stdin=PIPE,
        stdout=PIPE,
        stderr=DEVNULL,
        env={name: os.environ[name] for name in names} | {"OPENBLAS_NUM_THREADS": "1"},
    )


class Decoder:
    """A pool of decoder processes, which start when they are needed.

    A slow machine decodes the largest image in a fifth of `image_s`.
    """

    def __init__(self, *, processes: int = 2, image_s: float = 15.0, slow_s: float = 45.0) -> None:
        self._slots = FairSlots(processes)
        self._slow_slots = FairSlots(1)  # videos and documents must not delay images
        self._idle: list[DecoderProcess] = []
        self._idle_readers: list[DecoderProcess] = []  # processes for documents
        self._image_s = image_s
        self._slow_s = slow_s

    async def close(self) -> None:
        """Stop the idle processes. The others stop when their requests are cancelled."""
        idle = [*self._idle, *self._idle_readers]
        self._idle, self._idle_readers = [], []
        for process in idle:
            await process.stop()

    def _idle_for(self, job: MediaJob) -> list[DecoderProcess]:
        return self._idle_readers if job.is_document else self._idle

    async def decode(self, job: MediaJob, tenant: bytes) -> list[Frame]:
        """Return the image, or the frames of the video. Raises BadMedia."""
        frames = await self._result(job, tenant)
        assert isinstance(frames, list), "`run` has checked it"
        return frames

    async def extract(self, job: MediaJob, tenant: bytes) -> str:
        """Return the text of a document. Raises BadMedia."""
        text = await self._result(job, tenant)
        assert isinstance(text, Text), "`run` has checked it"
        return text.text

    async def _result(self, job: MediaJob, tenant: bytes) -> Decoded:
        slow_slot = self._slow_slots.slot(tenant) if job.is_slow else nullcontext()
        async with slow_slot, self._slots.slot(tenant):
            while idle := self._idle_for(job):
                try:
                    return await self._run(idle.pop(), job)
                except DecoderDied:  # it may have been killed while it was idle
                    continue
            try:
                process = await DecoderProcess.spawn(documents=job.is_document)
                return await self._run(process, job)
            except DecoderDied:
                raise BadMedia(
                    "The file made its decoder fail, so it was not used. If it is not damaged, "
                    "send it in another format."
                ) from None

    async def _run(self, process: DecoderProcess, job: MediaJob) -> Decoded:
        limit_s = self._slow_s if job.is_slow else self._image_s
        try:
            async with asyncio.timeout(limit_s):
                result = await process.run(job)
        except BaseException as error:
            await process.stop()
            if isinstance(error, TimeoutError):
                raise BadMedia(
                    f"Decoding the file takes more than {limit_s:g} seconds. Send a smaller one."
                ) from None
            raise
        self._idle_for(job).append(process)
        if isinstance(result, str):
            raise BadMedia(result)
        return result
