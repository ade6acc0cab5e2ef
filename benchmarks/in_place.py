"""Measures the cost of computing only the new tokens of a turn when its context is in place.

It uses llama.cpp's own server, whose slot then has exactly this context. Its native endpoint takes
token ids, so both token counts equal those of the turn. Transport and client clock are also the
same.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from random import Random
from statistics import median
from typing import Any

import httpx
import orjson

from rekindle.bench import BenchFailed
from rekindle.bench.rig import nonce, prose

REPEATS = 5
TIMEOUT_S = 600


def measure(url: str, context_tokens: int, new_tokens: int, chance: Random) -> float:
    """Median time to first token of this many new tokens after a context that a slot holds."""
    try:
        with httpx.Client(base_url=url, timeout=TIMEOUT_S, trust_env=False) as http:
            return median(_times_s(http, context_tokens, new_tokens, chance))
    except httpx.HTTPError as error:
        raise BenchFailed(f"llama.cpp's server failed the reference: {error}") from error


def _times_s(
    http: httpx.Client, context_tokens: int, new_tokens: int, chance: Random
) -> Iterator[float]:
    context = _token_ids(http, chance, context_tokens)
    _complete(http, context)
    for _ in range(REPEATS):
        ttft_s, timings = _complete(http, context + _token_ids(http, chance, new_tokens))
        _check(timings, context_tokens, new_tokens)
        yield ttft_s


def _token_ids(http: httpx.Client, chance: Random, tokens: int) -> list[int]:
    content = f"{nonce(chance)}. {prose(chance, 2 * tokens)}"
    response = http.post("/tokenize", json={"content": content}, headers={"Connection": "close"})
    found: list[int] = response.raise_for_status().json()["tokens"]
    return found[:tokens]


def _complete(http: httpx.Client, token_ids: list[int]) -> tuple[float, dict[str, Any]]:
    """The time to the first streamed event, and the number of tokens that the server computed."""
    body = {"prompt": token_ids, "n_predict": 2, "temperature": 0, "stream": True}
    sent_s, first_s, last = time.perf_counter(), None, ""
    with http.stream("POST", "/completion", json=body, headers={"Connection": "close"}) as stream:
        stream.raise_for_status()
        for line in stream.iter_lines():
            if line.startswith("data:"):
                first_s = first_s or time.perf_counter()
                last = line
    if first_s is None:
        raise BenchFailed("llama.cpp's server sent nothing")
    return first_s - sent_s, orjson.loads(last.removeprefix("data:")).get("timings", {})


def _check(timings: dict[str, Any], context_tokens: int, new_tokens: int) -> None:
    """A nonce may share its first tokens with an earlier one, but only a few."""
    if abs(timings["prompt_n"] - new_tokens) > 2:
        raise BenchFailed(
            f"llama.cpp's server computed {timings['prompt_n']} tokens for the reference, not "
            f"{new_tokens} on a context of {context_tokens}"
        )
