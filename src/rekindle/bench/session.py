"""Runs a bench: connect, calibrate, run every scenario and collect the results."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

from rich.console import Console

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
from rekindle.models.progress import TaskProgress

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
    with TaskProgress(console) as progress:
        return asyncio.run(_run(options, progress))


async def _run(options: BenchOptions, progress: TaskProgress) -> Results:
    async with AsyncExitStack() as stack:
        with progress.task("calibrating", 1) as step:
            rig = await stack.enter_async_context(open_rig(options))
            step()
        rounds = {name: await _repeat(name, rig, progress) for name in options.scenarios}
        label = options.label or options.base_url
        return Results(label, rig.client.model, rig.ignores_eos, rounds, rig.options.scale)


async def _repeat(name: str, rig: Rig, progress: TaskProgress) -> list[Round]:
    rounds = []
    with progress.task(name, rig.options.repeats) as step:
        for _ in range(rig.options.repeats):
            rounds.append(await SCENARIOS[name](rig))
            step()
    return rounds
