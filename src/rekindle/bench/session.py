"""Runs a bench: connect, calibrate, run every scenario and collect the results."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from rich.console import Console
from rich.progress import Progress

from rekindle.bench.agent_scenarios import measure_pictures, measure_schema, measure_toolloop
from rekindle.bench.client import BenchOptions
from rekindle.bench.results import Results
from rekindle.bench.rig import Rig, Round, open_rig
from rekindle.bench.scenarios import (
    measure_agents,
    measure_article,
    measure_crowd,
    measure_decode,
    measure_document,
    measure_hybrid,
    measure_sampled,
    measure_savings,
)
from rekindle.models.progress import task_bars

SCENARIOS: dict[str, Callable[[Rig], Awaitable[Round]]] = {
    "article": measure_article,
    "savings": measure_savings,
    "document": measure_document,
    "agents": measure_agents,
    "decode": measure_decode,
    "sampled": measure_sampled,
    "crowd": measure_crowd,
    "schema": measure_schema,
    "toolloop": measure_toolloop,
    "hybrid": measure_hybrid,
    "pictures": measure_pictures,
}


def run(options: BenchOptions, console: Console) -> Results:
    """Measure a server and show the progress. Raises BenchFailed."""
    with task_bars(console) as progress:
        return asyncio.run(_run(options, progress))


async def _run(options: BenchOptions, progress: Progress) -> Results:
    calibration = progress.add_task("calibrating", total=1)
    async with open_rig(options) as rig:
        progress.update(calibration, completed=1)
        rounds = {name: await _repeat(name, rig, progress) for name in options.scenarios}
        return Results(options.label or options.base_url, rig.client.model, rig.ignores_eos, rounds)


async def _repeat(name: str, rig: Rig, progress: Progress) -> list[Round]:
    task = progress.add_task(name, total=rig.options.repeats)
    rounds = []
    for _ in range(rig.options.repeats):
        rounds.append(await SCENARIOS[name](rig))
        progress.advance(task)
    return rounds
