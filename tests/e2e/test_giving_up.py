"""Clients hang up in the middle of a long prompt and come back."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.numpy_engine import SUFFIX
from tests.support.numpy_engine.model import write_numpy
from tests.support.server import Server, running
from tests.support.tiny import write_lfm2, write_llama

CONTEXT = 8192
WAIT_S = 30.0


def body(**more: Any) -> dict[str, Any]:
    text = "".join(f"The {number}th wave broke on the rocks. " for number in range(185))
    return {
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": 1,
        **more,
    }


def give_up_after(client: httpx.Client, tokens: int) -> int:
    """Hang up after this part of the prompt is computed, and return how much was."""
    asked = body(stream=True, prefill_progress=True)
    with client.stream("POST", "/v1/chat/completions", json=asked) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            progress = json.loads(line.removeprefix("data: ")).get("prefill_progress")
            if progress and progress["done_tokens"] > tokens:
                return int(progress["done_tokens"])
    raise AssertionError("the prompt was read to its end")


def figure(server: Server, name: str) -> int:
    with server.client() as client:
        return int(client.get("/v1/cache/stats").json()[name])


def await_rest(server: Server) -> None:
    """Wait until the turn of the disconnected client has ended."""
    deadline = time.monotonic() + WAIT_S
    while figure(server, "active_turns"):
        assert time.monotonic() < deadline, "it goes on for nobody"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("write", "suffix", "layers"),  # enough to make the prefill take a while
    [(write_llama, ".gguf", 8), (write_lfm2, ".gguf", 8), (write_numpy, SUFFIX, 2)],
)
def test_five_clients_that_hang_up_and_one_that_waits_compute_each_token_once(
    write: Callable[..., Path], suffix: str, layers: int, tmp_path: Path
) -> None:
    model = write(tmp_path / f"tiny{suffix}", layers=layers, context=CONTEXT)
    with running(model, tmp_path, "--max-model-len", str(CONTEXT)) as server:
        read = 0
        for _ in range(5):
            with server.client() as client:
                read = give_up_after(client, read)
            await_rest(server)
        with server.client() as client:
            usage = client.post("/v1/chat/completions", json=body()).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= read
        assert figure(server, "computed_tokens") == usage["prompt_tokens"]
