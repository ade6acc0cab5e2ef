"""Compares Rekindle with llama.cpp's own server: same model, threads and context, in turns."""

from __future__ import annotations

import asyncio
import secrets
import signal
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from models import fitting
from paired import PairedRun
from report import print_comparison, save
from rich.console import Console
from targets import Comparison

from rekindle.config import load_config
from rekindle.errors import RekindleError
from rekindle.models.progress import TaskProgress, progress_on
from rekindle.models.pull import pull

REPEATS = {
    "article": 3, "document": 3, "agents": 2, "decode": 5, "sampled": 5, "crowd": 2, "schema": 3,
    "toolloop": 3, "hybrid": 1, "pictures": 5,
}  # fmt: skip
QUICK = {**dict.fromkeys(REPEATS, 1), "decode": 2, "sampled": 2}
FOLDER = Path("bench-results")


def main(
    quick: Annotated[bool, typer.Option("--quick", help="Measure with fewer repeats.")] = False,
    only: Annotated[
        str | None, typer.Option(help=f"Measure only one of {', '.join(REPEATS)}.")
    ] = None,
    model: Annotated[Path | None, typer.Option(help="GGUF file for all scenarios.")] = None,
) -> None:
    """Compare the two servers. A missed target is shown, but only an error fails."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # both servers must end with this process
    console = Console()
    repeats = QUICK if quick else REPEATS
    if only is not None and only not in repeats:
        raise typer.BadParameter(f"there is no scenario {only}; there are {', '.join(repeats)}")
    try:
        models_dir = load_config({}).models_dir
        path = model or pull("smollm2", models_dir=models_dir, progress=progress_on(console))
        chosen = {only: repeats[only]} if only else repeats
        with tempfile.TemporaryDirectory(prefix="rekindle-bench-") as folder:
            models = {name: model or fitting(name, path, Path(folder)) for name in chosen}
            comparison = compare(models, chosen, console)
        print_comparison(comparison, console)
        save(comparison, FOLDER)
    except RekindleError as error:
        console.print(str(error), markup=False)
        raise typer.Exit(1) from error


def compare(models: dict[str, Path], repeats: dict[str, int], console: Console) -> Comparison:
    """Run every scenario this many times on both servers."""

    async def measure(run: PairedRun) -> Comparison:
        for scenario, times in repeats.items():
            await run.measure(scenario, times)
        return run.comparison()

    with TaskProgress(console) as progress:
        return asyncio.run(measure(PairedRun(models, FOLDER, secrets.token_hex(4), progress)))


if __name__ == "__main__":
    typer.run(main)
