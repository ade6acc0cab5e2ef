"""Fifty clients that send the same prompt at the same time cost as much as one of them.

The prompt is computed once, written once, and after a restart read once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.stress.test_overload import PATIENCE_S, gauge, is_at_rest, paused, soon
from tests.support.server import Server, running
from tests.support.tiny import write_llama

CLIENTS = 50
ARRIVAL_S = 0.5  # by then practically all requests wait in the runtime's socket
REPLY_TOKENS = 4
BLOCK_TOKENS = 64
FLAGS = ("--threads", "1", "--disk-cache", "200MB", "--disk-floor", "0")

Json = dict[str, Any]


@dataclass(frozen=True)
class Cost:
    """What the server did for some requests, by its counters."""

    computed_tokens: int
    disk_read_bytes: int
    disk_written_bytes: int


def counters(client: httpx.Client) -> Cost:
    return Cost(
        gauge(client, "computed_tokens_total"),
        gauge(client, "disk_read_bytes_total"),
        gauge(client, "disk_written_bytes_total"),
    )


def is_stored(client: httpx.Client) -> bool:
    """Whether all whole blocks are on disk. The rest is written when the server stops."""
    entries = client.get("/v1/cache").json()["entries"]
    stored = all(each["stored_tokens"] > each["token_count"] - BLOCK_TOKENS for each in entries)
    return stored and gauge(client, "disk_queued_bytes") == 0


def ask(client: httpx.Client, prompt: str) -> Json:
    body = {"prompt": prompt, "max_tokens": REPLY_TOKENS, "temperature": 0, "ignore_eos": True}
    answer = client.post("/v1/completions", json={**body, "return_cache_key": True})
    assert answer.status_code == httpx.codes.OK, answer.text
    found: Json = answer.json()
    return found


def cost_of(server: Server, client: httpx.Client, prompt: str, clients: int) -> Cost:
    """The cost of a prompt that all clients send while no turn makes progress."""
    before = counters(client)
    with ThreadPoolExecutor(clients) as threads:
        with paused(server):
            asked = [threads.submit(ask, client, prompt) for _ in range(clients)]
            soon(lambda: sum(each.running() for each in asked) == clients)
            time.sleep(ARRIVAL_S)
        texts = {each.result(PATIENCE_S)["choices"][0]["text"] for each in asked}
    assert len(texts) == 1, "equal greedy requests have equal answers"
    soon(lambda: is_at_rest(client) and is_stored(client))
    after = counters(client)
    return Cost(
        after.computed_tokens - before.computed_tokens,
        after.disk_read_bytes - before.disk_read_bytes,
        after.disk_written_bytes - before.disk_written_bytes,
    )


@contextmanager
def serving(model: Path, folder: Path) -> Iterator[tuple[Server, httpx.Client]]:
    limits = httpx.Limits(max_connections=None)
    with (
        running(model, folder, *FLAGS) as server,
        httpx.Client(base_url=server.url, timeout=PATIENCE_S, limits=limits) as client,
    ):
        yield server, client


def test_equal_cold_prompts_are_computed_written_and_read_once(tmp_path: Path) -> None:
    """Beyond the prompt, each client costs its own reply: the last token of the prompt, for its
    logits, and all tokens of the reply but the last."""
    model = write_llama(tmp_path / "tiny.gguf", context=2048)
    alone, crowded = "A quiet word. " * 60, "B quiet word. " * 60
    with serving(model, tmp_path) as (server, client):
        one = cost_of(server, client, alone, 1)
        many = cost_of(server, client, crowded, CLIENTS)
    assert one.computed_tokens > len(alone) // 2
    assert many.computed_tokens == one.computed_tokens + (CLIENTS - 1) * REPLY_TOKENS
    assert many.disk_written_bytes == one.disk_written_bytes > 0
    assert many.disk_read_bytes == one.disk_read_bytes == 0
    with serving(model, tmp_path) as (server, client):
        one = cost_of(server, client, alone, 1)
        many = cost_of(server, client, crowded, CLIENTS)
    assert one.computed_tokens == REPLY_TOKENS
    assert many.computed_tokens == CLIENTS * REPLY_TOKENS
    assert many.disk_read_bytes == one.disk_read_bytes > 0
    assert many.disk_written_bytes == one.disk_written_bytes == 0
