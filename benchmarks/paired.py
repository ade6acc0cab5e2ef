"""Measures both servers in turns, so that each ratio comes from the same period of time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import cast

import in_place
from machine import Load, load_between, read
from models import projector
from servers import Server, Setup, llamacpp, rekindle
from targets import Comparison

from rekindle.bench import BenchOptions, Results
from rekindle.bench.rig import Rig, Round, open_rig
from rekindle.bench.scenarios import Article, computed_in
from rekindle.bench.session import SCENARIOS
from rekindle.models.progress import TaskProgress

PAUSE_S = 0.5  # writes after a turn must not disturb the measurement of the other server

# Concurrent turns of both servers. They are each server's default, except for agents, which share
# four slots, and for eight streams, of which half would wait with four slots.
OUR_SLOTS = {
    "article": 16, "document": 16, "agents": 4, "decode": 8, "sampled": 8, "crowd": 16, "schema": 4,
    "toolloop": 4, "hybrid": 4, "pictures": 4,
}  # fmt: skip
THEIR_SLOTS = {**OUR_SLOTS, "article": 4, "document": 4, "crowd": 4}


@dataclass(frozen=True, slots=True)
class Side:
    """One server with its rig."""

    server: Server
    rig: Rig

    async def measure(self, scenario: str, seed: str) -> Round:
        """One round; the same seed gives both servers the same texts."""
        return await SCENARIOS[scenario](replace(self.rig, chance=Random(seed)))


@dataclass(slots=True)
class PairedRun:
    """Collects the rounds of both servers, scenario by scenario."""

    models: Mapping[str, Path]  # by scenario
    folder: Path
    seed: str
    progress: TaskProgress
    ours: dict[str, list[Round]] = field(default_factory=dict)
    theirs: dict[str, list[Round]] = field(default_factory=dict)
    in_place_s: list[float] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    ignores_eos: list[bool] = field(default_factory=list)

    async def measure(self, scenario: str, repeats: int) -> None:
        """Start both servers afresh and measure them round by round."""
        async with AsyncExitStack() as stack:
            step = stack.enter_context(self.progress.task(scenario, 2 * repeats))
            ours, theirs = await self._enter(stack, scenario)
            for number in range(repeats):
                await self._round(scenario, number, ours, theirs, step)

    async def _enter(self, stack: AsyncExitStack, scenario: str) -> tuple[Side, Side]:
        model, mmproj = self.models[scenario], projector(scenario)
        ours = Setup(model=model, mmproj=mmproj, slots=OUR_SLOTS[scenario])
        theirs = Setup(model=model, mmproj=mmproj, slots=THEIR_SLOTS[scenario])
        servers = (
            stack.enter_context(rekindle(ours, self.folder / "rekindle.log")),
            stack.enter_context(llamacpp(theirs, self.folder / "llamacpp.log")),
        )
        sides = []
        for server in servers:
            options = BenchOptions(base_url=server.url, label=server.label)
            sides.append(Side(server, await stack.enter_async_context(open_rig(options))))
        self.ignores_eos = [side.rig.ignores_eos for side in sides]
        return sides[0], sides[1]

    async def _round(
        self, scenario: str, number: int, ours: Side, theirs: Side, step: Callable[[], None]
    ) -> None:
        sides = [(ours, theirs, self.ours), (theirs, ours, self.theirs)]
        for active, idle, rounds in sides if number % 2 == 0 else reversed(sides):
            measured = await self._alone(active, idle, scenario, f"{self.seed}-{number}")
            rounds.setdefault(scenario, []).append(measured)
            step()
        if scenario == "article":
            await self._reference(theirs.server)

    async def _alone(self, active: Side, idle: Side, scenario: str, seed: str) -> Round:
        """Measure one server, and the processor use of everything else."""
        await asyncio.sleep(PAUSE_S)
        processes = active.server.process_id, idle.server.process_id
        before = read(*processes)
        measured = await active.measure(scenario, seed)
        after = read(*processes)
        if before and after:
            self.loads.append(load_between(before, after, scenario, active.server.label))
        return measured

    async def _reference(self, server: Server) -> None:
        """The cost of computing only the tokens of our last turn two, after a context of the same
        length."""
        article = cast(Article, self.ours["article"][-1])
        new_tokens = computed_in(article.first, article.second)
        context_tokens = article.second.prompt_tokens - new_tokens
        chance = Random(f"{self.seed}-{len(self.in_place_s)}")
        self.in_place_s.append(
            await asyncio.to_thread(
                in_place.measure, server.url, context_tokens, new_tokens, chance
            )
        )

    def comparison(self) -> Comparison:
        model = ", ".join(dict.fromkeys(path.name for path in self.models.values()))
        return Comparison(
            ours=Results("Rekindle", model, self.ignores_eos[0], self.ours),
            theirs=Results("llama.cpp", model, self.ignores_eos[1], self.theirs),
            in_place_s=self.in_place_s,
            loads=self.loads,
        )
