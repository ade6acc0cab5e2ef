"""Measures what the disk cache saves: turn two after a restart compared with a cold one.

    python benchmarks/restart.py [--rounds 3] [--model FILE.gguf]

The server answers a turn of about 1,500 tokens and is restarted. The time to first token of the
next turn is measured, and then the same turn on a server with an empty cache. After that, in one
process, it compares restoring from RAM with a plain copy in memory, and fetching, verifying and
restoring from disk with a plain read of the same files. Files are dropped from the page cache
before each read, unless the table says otherwise.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import tempfile
from pathlib import Path
from random import Random
from statistics import median
from typing import Annotated

import typer
from restore import Speeds, measure_speeds
from rich.console import Console
from rich.table import Table
from servers import Setup, rekindle

from rekindle.bench import BenchOptions
from rekindle.bench.client import Message, connect
from rekindle.bench.results import write_json
from rekindle.bench.rig import nonce, prose
from rekindle.config import load_config
from rekindle.models.progress import progress_on
from rekindle.models.pull import pull

WORDS = 1130  # about 1,500 tokens of SmolLM2
REPLY_TOKENS = 32
FOLDER = Path("bench-results")
AT_LEAST_FASTER = 15.0
AT_LEAST_OF_PLAIN = 0.5


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Number of measurements.")] = 3,
    model: Annotated[Path | None, typer.Option(help="GGUF file; default smollm2.")] = None,
) -> None:
    console = Console()
    models_dir = load_config({}).models_dir
    path = model or pull("smollm2", models_dir=models_dir, progress=progress_on(console))
    pairs = []
    with console.status("turns after a restart, and cold") as status:
        for number in range(rounds):
            pairs.append(asyncio.run(_round(Setup(model=path, slots=4))))
            status.update(f"turns after a restart, and cold: {number + 1} of {rounds}")
    with console.status("restoring from RAM and from disk"):
        speeds = measure_speeds(path, rounds)
    _show(console, pairs, speeds)
    write_json(
        {
            "turn_two_s": [{"after_restart": warm, "cold": cold} for warm, cold in pairs],
            "restore_gb_per_s": {name: speed.as_json() for name, speed in speeds.items()},
        },
        FOLDER / "restart.json",
    )


async def _round(setup: Setup) -> tuple[float, float]:
    """The time to first token of a second turn, after a restart and with an empty cache."""
    chance = Random(secrets.token_hex(8))
    question = f"{nonce(chance)}.\n\n{prose(chance, WORDS)}\n\nWhat is this about?"
    messages: list[Message] = [{"role": "user", "content": question}]
    log = FOLDER / "rekindle.log"
    with tempfile.TemporaryDirectory(prefix="rekindle-bench-") as folder:
        with rekindle(setup, log, Path(folder)) as server:
            reply, _ = await _ask(server.url, messages)
        messages += [
            {"role": "assistant", "content": reply},
            {"role": "user", "content": "Say it in one word."},
        ]
        drop_from_page_cache(Path(folder))
        with rekindle(setup, log, Path(folder)) as server:
            _, warm_s = await _ask(server.url, messages)
    with rekindle(setup, log) as server:
        _, cold_s = await _ask(server.url, messages)
    return warm_s, cold_s


async def _ask(url: str, messages: list[Message]) -> tuple[str, float]:
    async with connect(BenchOptions(base_url=url)) as client:
        await client.chat(
            [{"role": "user", "content": "Hello"}], 1
        )  # warm-up, because the first request is slow
        reply = await client.chat(messages, REPLY_TOKENS)
        return reply.text, reply.ttft_s


def drop_from_page_cache(folder: Path) -> None:
    """Make the next read come from the disk, if possible. Linux only."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in folder.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(handle)


def _show(console: Console, pairs: list[tuple[float, float]], speeds: dict[str, Speeds]) -> None:
    table = Table("figure", "measured", "compared with", "ratio", "target", title="medians")
    warm, cold = (median(column) for column in zip(*pairs, strict=True))
    faster = [cold_s / warm_s for warm_s, cold_s in pairs]
    table.add_row(
        "turn 2 after a restart, first token",
        f"{warm:.3f} s",
        f"{cold:.2f} s cold",
        _spread(faster),
        f">= {AT_LEAST_FASTER:g}",
    )
    for name, speed in speeds.items():
        table.add_row(
            f"restored from {name}",
            f"{median(speed.ours):.2f} GB/s",
            f"{median(speed.plain):.2f} GB/s plain",
            _spread(speed.ratios()),
            f">= {AT_LEAST_OF_PLAIN:g}",
        )
    console.print(table)


def _spread(ratios: list[float]) -> str:
    return f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


if __name__ == "__main__":
    typer.run(main)
