"""Measures both servers while other programs use cores of the machine.

Run it with `python benchmarks/busy_core.py` while nothing else runs. It starts busy programs of its
own. The servers have their default number of threads, one per core, and take turns.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from statistics import median
from typing import Annotated, NamedTuple

import typer
from rich.console import Console
from rich.table import Table
from servers import Server, Setup, llamacpp, rekindle

from rekindle.config import load_config
from rekindle.models.progress import progress_on
from rekindle.models.pull import pull

WORDS = ("the", "of", "and", "to", "in", "is", "that", "for", "it", "was", "with", "not", "at")
PROMPT_WORDS = (40, 600)
REPLY_TOKENS = 32
TIMEOUT_S = 300


class Turn(NamedTuple):
    first_s: float
    token_s: float


@contextmanager
def busy_programs(count: int) -> Iterator[None]:
    command = [sys.executable, "-c", "while True: pass"]
    programs = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def turn(server: Server, words: int, seed: str) -> Turn:
    """Stream one chat with a prompt that the server has not seen."""
    prompt = " ".join(Random(seed).choices(WORDS, k=words))
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": REPLY_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    request = urllib.request.Request(
        f"{server.url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    started, times = time.perf_counter(), list[float]()
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        for line in answer:
            if b'"content":"' in line.replace(b" ", b""):
                times.append(time.perf_counter())
    return Turn(times[0] - started, (times[-1] - times[0]) / (REPLY_TOKENS - 1))


def main(
    busy: Annotated[int, typer.Option(help="Busy programs next to the server.")] = 1,
    rounds: Annotated[int, typer.Option(help="Turns of each length, for each server.")] = 5,
) -> None:
    """Compare the two servers, first undisturbed and then next to busy programs."""
    models_dir = load_config({}).models_dir
    model = pull("smollm2", models_dir=models_dir, progress=progress_on(Console()))
    setup = Setup(model=model, slots=4, threads=os.cpu_count() or 2)
    table = Table("programs", "prompt words", "server", "first token", "token", "slowest first")
    with (
        tempfile.TemporaryDirectory(prefix="rekindle-bench-") as name,
        rekindle(setup, Path(name, "rekindle.log")) as ours,
        llamacpp(setup, Path(name, "llamacpp.log")) as theirs,
    ):
        for count in (0, busy):
            with busy_programs(count):
                for words in PROMPT_WORDS:
                    _measure(table, (ours, theirs), count, words, rounds)
    Console().print(table)


def _measure(table: Table, servers: tuple[Server, ...], busy: int, words: int, rounds: int) -> None:
    turns: dict[str, list[Turn]] = {server.label: [] for server in servers}
    for number in range(rounds + 1):
        for server in servers:
            measured = turn(server, words, f"{busy} {words} {number}")
            if number:  # what a server does for the first time does not count
                turns[server.label].append(measured)
    for label, measured_turns in turns.items():
        firsts = [each.first_s for each in measured_turns]
        token_s = median(each.token_s for each in measured_turns)
        cells = (median(firsts), token_s, max(firsts))
        table.add_row(str(busy), str(words), label, *(f"{1000 * cell:.0f} ms" for cell in cells))


if __name__ == "__main__":
    typer.run(main)
