"""A damaged or malicious model file causes an error message, and the server keeps running."""

from __future__ import annotations

import asyncio
import random
import struct
from contextlib import suppress
from pathlib import Path

import pytest

from rekindle.errors import ModelError
from rekindle.models.gguf import check_gguf
from rekindle.protocol.events import Finished
from rekindle.protocol.requests import GenerateRequest, LoadModel, SamplingParams
from rekindle.protocol.settings import RuntimeSettings
from rekindle.worker.client import RuntimeClient
from tests.support.rounds import rounds
from tests.support.tiny import write_llama, write_phi3

ROUNDS = rounds(short=4, long=200)
PATIENCE_S = 120.0
HEADER_BYTES = 5_000  # header size of the tiny models; tensors follow
NUMBERS = (0, 1, 7, 255, 1 << 16, (1 << 31) - 1, (1 << 32) - 1, 1 << 63, (1 << 64) - 1)


def mutated(content: bytes, rng: random.Random) -> bytes:
    """Apply one to three changes: a byte, a number, or a truncation."""
    copy = bytearray(content)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(8, HEADER_BYTES)
        match rng.randrange(8):
            case 0:
                del copy[rng.randrange(len(copy) // 2, len(copy)) :]
            case 1 | 2:
                copy[at : at + 8] = struct.pack("<Q", rng.choice(NUMBERS))
            case 3:
                copy[at : at + 4] = struct.pack("<I", rng.choice(NUMBERS) & 0xFFFFFFFF)
            case _:
                copy[at] = rng.randrange(256)
    return bytes(copy)


def client(path: Path) -> RuntimeClient:
    settings = RuntimeSettings(
        parallel=2, threads=1, ram_cache=1 << 26, disk_cache=0, max_model_len=512
    )
    return RuntimeClient("tiny", LoadModel(path=str(path), settings=settings), queue=2)


async def answers(runtime: RuntimeClient) -> bool:
    """Whether a turn finishes successfully."""
    asked = GenerateRequest(
        turn=0, prompt=[5, 6, 7], sampling=SamplingParams(temperature=0), max_tokens=2
    )
    async with asyncio.timeout(PATIENCE_S):
        events = [event async for event in runtime.stream(asked)]
    return isinstance(events[-1], Finished)


async def load_all(healthy: Path, sources: list[bytes], suspect: Path) -> list[str]:
    """The outcome of loading each mutated model."""
    served = client(healthy)
    outcomes = []
    await served.start()
    try:
        for number in range(ROUNDS):
            rng = random.Random(number)
            suspect.write_bytes(mutated(rng.choice(sources), rng))
            outcomes.append(await outcome(suspect))
            assert await answers(served), f"the other model suffered from number {number}"
    finally:
        await served.stop()
    return outcomes


async def outcome(path: Path) -> str:
    """How loading a model ended. Its process is gone afterwards."""
    with suppress(ModelError):  # the messages at the start of a server and of a runtime
        check_gguf(path)
    runtime = client(path)
    try:
        async with asyncio.timeout(PATIENCE_S):
            await runtime.start()
        await answers(runtime)  # it may fail, because its numbers are arbitrary
    except ModelError as error:
        return str(error)
    finally:
        await runtime.stop()
    return "served"


@pytest.mark.long
def test_mutated_models_never_stop_the_front_or_other_models(tmp_path: Path) -> None:
    healthy = write_llama(tmp_path / "healthy.gguf", context=512)
    longrope = write_phi3(tmp_path / "longrope.gguf", context=512)
    sources = [healthy.read_bytes(), longrope.read_bytes()]
    outcomes = asyncio.run(load_all(healthy, sources, tmp_path / "suspect.gguf"))
    refused = [each for each in outcomes if each != "served"]
    assert len(outcomes) == ROUNDS
    assert len(refused) > ROUNDS // 4
    assert [each for each in refused if not each.strip() or "\n" in each] == []
