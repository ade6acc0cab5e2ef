"""Rekindle beside mlx_lm's own server, both on folders of random weights made on the spot.

    python benchmarks/mlx_peers.py [--quick] [--only SCENARIO]

Eight turns on a model with full attention and on a hybrid one, tool loops, and eight streams at
once, greedily and with temperature. Nothing else may run meanwhile.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from models import TOOL_TEMPLATE
from rich.console import Console
from rich.table import Table
from servers import Setup, mlx_lm, rekindle

from rekindle.bench.agent_scenarios import measure_toolloop
from rekindle.bench.client import BenchOptions
from rekindle.bench.rig import BenchConversation, Rig, TimedTurn, open_rig
from rekindle.bench.scenarios import least_for, measure_decode, measure_sampled

ROOT = Path(__file__).parents[1]
LOGS = Path("bench-results")
CONTEXT_TOKENS = 8192
STREAMS = 8

Figures = dict[str, float]
Scenario = Callable[[Rig], Awaitable[Figures]]


async def _eight_turns(rig: Rig) -> Figures:
    """A conversation that grows: what of it is computed, and how long its second turn waits."""
    talk = BenchConversation(rig)
    turns: list[TimedTurn] = []
    for _ in range(rig.options.turns):
        turns.append(await talk.ask(f"{rig.nonce()}. {rig.prose(rig.options.turn_tokens)}"))
    return {
        "computed_tokens": sum(turn.computed_tokens for turn in turns),
        "least_tokens": least_for(turns),
        "second_turn_ttft_s": turns[1].ttft_s,
    }


async def _tool_loop(rig: Rig) -> Figures:
    return (await measure_toolloop(rig)).figures()


async def _greedy(rig: Rig) -> Figures:
    return (await measure_decode(rig)).figures()


async def _sampled(rig: Rig) -> Figures:
    return (await measure_sampled(rig)).figures()


@dataclass(frozen=True, slots=True)
class Case:
    family: str  # of the model, as `write_tiny_mlx` calls it
    measure: Scenario
    repeats: int


CASES = {
    "turns": Case("llama", _eight_turns, 3),
    "hybrid": Case("falcon_h1", _eight_turns, 1),
    "toolloop": Case("llama", _tool_loop, 3),
    "decode": Case("llama", _greedy, 5),
    "sampled": Case("llama", _sampled, 5),
}


def main(
    quick: Annotated[bool, typer.Option("--quick", help="One repeat of each.")] = False,
    only: Annotated[str | None, typer.Option(help=f"One of {', '.join(CASES)}.")] = None,
) -> None:
    """Print the medians of both servers; larger is better of what is per second alone."""
    if only is not None and only not in CASES:
        raise typer.BadParameter(f"there is no scenario {only}; there are {', '.join(CASES)}")
    console = Console()
    with tempfile.TemporaryDirectory(prefix="rekindle-bench-") as folder:
        for name in [only] if only else CASES:
            case = CASES[name]
            model = _write_model(Path(folder) / name, case.family)
            repeats = 1 if quick else case.repeats
            console.print(_table(name, _compare(model, case.measure, repeats)))


def _write_model(path: Path, family: str) -> Path:
    """Random weights: what is computed, and how fast, does not depend on what they say."""
    sys.path.append(str(ROOT))  # a script's path begins beside it, and the tests lie elsewhere
    from tests.support.tiny_mlx import write_tiny_mlx

    # With a head of its own it writes ASCII, so that its replies come back as they were written.
    config = {"max_position_embeddings": CONTEXT_TOKENS, "tie_word_embeddings": False}
    write_tiny_mlx(path, family, **config)
    (path / "chat_template.jinja").write_text(TOOL_TEMPLATE)
    return path


def _compare(model: Path, measure: Scenario, repeats: int) -> dict[str, list[Figures]]:
    """Both servers run at once and answer in turns: what disturbs the machine disturbs both."""
    setup = Setup(model=model, slots=STREAMS, context=CONTEXT_TOKENS)
    found: dict[str, list[Figures]] = {}
    nonce = secrets.token_hex(4)
    with ExitStack() as stack:
        servers = {  # with the name that each has for the model it was started with
            stack.enter_context(rekindle(setup, LOGS / "mlx-rekindle.log")): "default",
            stack.enter_context(mlx_lm(setup, LOGS / "mlx-peer.log")): "default_model",
        }
        for number in range(repeats):
            for server, name in servers.items():
                options = BenchOptions(
                    base_url=server.url,
                    label=server.label,
                    model=name,
                    streams=STREAMS,
                    seed=f"{nonce} {number}",  # both read the same texts
                )
                found.setdefault(server.label, []).append(asyncio.run(_run(options, measure)))
    return found


async def _run(options: BenchOptions, measure: Scenario) -> Figures:
    async with open_rig(options) as rig:
        return await measure(rig)


def _table(title: str, found: dict[str, list[Figures]]) -> Table:
    table = Table("", *found, title=title)
    names = dict.fromkeys(name for rounds in found.values() for each in rounds for name in each)
    for name in names:
        values = [[each[name] for each in rounds if name in each] for rounds in found.values()]
        table.add_row(name, *(f"{median(each):.4g}" if each else "-" for each in values))
    return table


if __name__ == "__main__":
    typer.run(main)
