"""Measures how the cost of a server grows with its load, over HTTP with a tiny random model."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from statistics import median, quantiles

import httpx

from rekindle.bench import BenchOptions
from rekindle.bench.client import Message, StreamedReply, connect
from rekindle.bench.rig import prose

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))  # the path of a script does not include the tests
from tests.support.server import Server, running  # noqa: E402 - after the line above
from tests.support.tiny import write_llama  # noqa: E402

MAX_TOKENS = 40_000  # of the whole conversation
SHORT_TOKENS = 1_024  # tokens of each concurrent turn
FOLLOW_UPS = 3
REPLY_TOKENS = 16
QUIET_S = 1.0  # without a write, after which a turn has written everything
POLL_S = 0.1
TIMEOUT_S = 600


def conversation(tokens: int, folder: Path) -> dict[str, float]:
    """Measure follow-ups in a conversation of this many tokens: the whole turn, the part of
    restoring state, and the bytes written to the index."""
    with _server(folder, MAX_TOKENS) as server, _http(server) as http:
        text = prose(Random(0), tokens // 5)[:tokens]  # each byte is one token
        history: list[Message] = [{"role": "user", "content": text}]
        _chat(http, history)
        _await_quiet(server)
        times_s, restore_s, written_bytes = [], [], []
        for number in range(FOLLOW_UPS):
            history.append({"role": "user", "content": f"Go on, {number}."})
            before = _written_bytes(server) - _block_bytes(folder)
            started_s = time.perf_counter()
            stages_s = _chat(http, history)
            times_s.append(time.perf_counter() - started_s)
            restore_s.append(stages_s["restore"])
            _await_quiet(server)
            written_bytes.append(_written_bytes(server) - _block_bytes(folder) - before)
    return {
        "follow_up_s": median(times_s),
        "of_which_restoring_s": median(restore_s),
        "written_beside_blocks_bytes": median(written_bytes),
    }


def concurrent_turns(count: int, folder: Path) -> dict[str, float]:
    """Measure this many concurrent turns with short prompts."""
    with _server(folder, SHORT_TOKENS) as server:
        asyncio.run(_ask_at_once(server.url, 1))  # warm-up, because the first request is slow
        started_s = time.perf_counter()
        replies = asyncio.run(_ask_at_once(server.url, count))
        taken_s = time.perf_counter() - started_s
    first_s = sorted(reply.ttft_s for reply in replies)
    slow_s = quantiles(first_s, n=20)[-1] if count > 1 else first_s[0]
    tokens = sum(reply.usage.completion_tokens for reply in replies)
    return {
        "first_token_s": median(first_s),
        "slowest_twentieth_s": slow_s,
        "throughput_rate": tokens / taken_s,
    }


async def _ask_at_once(url: str, count: int) -> list[StreamedReply]:
    async with connect(BenchOptions(base_url=url, timeout_s=TIMEOUT_S)) as client:
        asked = [
            client.chat(
                [{"role": "user", "content": f"{count}/{number}. {prose(Random(number), 20)}"}],
                REPLY_TOKENS,
                ignore_eos=True,
            )
            for number in range(count)
        ]
        return await asyncio.gather(*asked)


@contextmanager
def _server(folder: Path, context_tokens: int) -> Iterator[Server]:
    model = write_llama(folder / "tiny.gguf", context=context_tokens)
    with running(model, folder) as server:
        yield server


def _http(server: Server) -> httpx.Client:
    return httpx.Client(base_url=server.url, timeout=TIMEOUT_S, trust_env=False)


def _chat(http: httpx.Client, history: list[Message]) -> dict[str, float]:
    """Run one turn, append its reply to the history, and return the stages until its first
    token."""
    body = {"model": "tiny", "messages": history, "max_tokens": REPLY_TOKENS, "temperature": 0}
    answer = http.post("/v1/chat/completions", json=body).raise_for_status().json()
    history.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
    stages_s: dict[str, float] = answer["usage"]["first_token_time"]
    return stages_s


def _written_bytes(server: Server) -> int:
    """All bytes that the runtime has written so far."""
    total = 0
    for pid in server.worker_pids():
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
        total += next(int(line.split()[1]) for line in lines if line.startswith("wchar"))
    return total


def _block_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("kv/*/blocks/*"))


def _await_quiet(server: Server) -> None:
    """Wait until nothing has been written for a while."""
    last, since_s = _written_bytes(server), time.monotonic()
    while time.monotonic() - since_s < QUIET_S:
        time.sleep(POLL_S)
        if (now := _written_bytes(server)) != last:
            last, since_s = now, time.monotonic()
