"""Compares Rekindle with mlx_lm's own server, on models with random weights.

    python benchmarks/mlx_peers.py [--quick] [--only SCENARIO]

The scenarios are eight turns with full attention and with a hybrid model, a long prompt, many kept
conversations, tool loops, and eight concurrent streams, greedy and with a temperature. Nothing else
may run at the same time.
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
KEPT, KEPT_TOKENS = 24, 512  # conversations, and the tokens of each

Figures = dict[str, float]
Scenario = Callable[[Rig], Awaitable[Figures]]


async def _eight_turns(rig: Rig) -> Figures:
    """A growing conversation: how many tokens are computed, and the time to first token of turn
    two."""
    talk = BenchConversation(rig)
    turns: list[TimedTurn] = []
    for _ in range(rig.options.turns):
        turns.append(await talk.ask(f"{rig.nonce()}. {rig.prose(rig.options.turn_tokens)}"))
    return {
        "computed_tokens": sum(turn.computed_tokens for turn in turns),
        "least_tokens": least_for(turns),
        "second_turn_ttft_s": turns[1].ttft_s,
    }


async def _long_prompt(rig: Rig) -> Figures:
    """A prompt that takes half of the context, and the turn after it."""
    talk = BenchConversation(rig)
    cold = await talk.ask(f"{rig.nonce()}. {rig.prose(CONTEXT_TOKENS // 2)}")
    warm = await talk.ask("And then?")
    return {"cold_ttft_s": cold.ttft_s, "second_turn_ttft_s": warm.ttft_s}


async def _kept(rig: Rig) -> Figures:
    """More conversations than mlx_lm.server keeps by default. Each gets a second turn."""
    talks = [BenchConversation(rig) for _ in range(KEPT)]
    for talk in talks:
        await talk.ask(f"{rig.nonce()}. {rig.prose(KEPT_TOKENS)}")
    turns = [await talk.ask("And then?") for talk in talks]
    return {
        "computed_tokens": sum(turn.computed_tokens for turn in turns),
        "prompt_tokens": sum(turn.prompt_tokens for turn in turns),
        "second_turn_ttft_s": median(turn.ttft_s for turn in turns),
    }


async def _tool_loop(rig: Rig) -> Figures:
    return (await measure_toolloop(rig)).figures()


async def _greedy(rig: Rig) -> Figures:
    return (await measure_decode(rig)).figures()


async def _sampled(rig: Rig) -> Figures:
    return (await measure_sampled(rig)).figures()


@dataclass(frozen=True, slots=True)
class Case:
    family: str  # family of the model, for `write_tiny_mlx`
    measure: Scenario
    repeats: int


CASES = {
    "turns": Case("llama", _eight_turns, 3),
    "hybrid": Case("falcon_h1", _eight_turns, 1),
    "long": Case("llama", _long_prompt, 3),
    "kept": Case("llama", _kept, 1),
    "toolloop": Case("llama", _tool_loop, 3),
    "decode": Case("llama", _greedy, 5),
    "sampled": Case("llama", _sampled, 5),
}


def main(
    quick: Annotated[bool, typer.Option("--quick", help="Measure once, without repeats.")] = False,
    only: Annotated[
        str | None, typer.Option(help=f"Measure only one of {', '.join(CASES)}.")
    ] = None,
) -> None:
    """Print the medians of both servers. Larger is better only for figures per second."""
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
    """Write random weights. They affect neither how much is computed nor how fast."""
    sys.path.append(str(ROOT))  # the path of a script does not include the tests
    from tests.support.tiny_mlx import write_tiny_mlx

    # With a separate output head it writes only ASCII, so that its replies come back unchanged.
    config = {"max_position_embeddings": CONTEXT_TOKENS, "tie_word_embeddings": False}
    write_tiny_mlx(path, family, **config)
    (path / "chat_template.jinja").write_text(TOOL_TEMPLATE)
    return path


def _compare(model: Path, measure: Scenario, repeats: int) -> dict[str, list[Figures]]:
    """Run both servers and let them answer in turns, so that disturbances affect both."""
    setup = Setup(model=model, slots=STREAMS, context=CONTEXT_TOKENS)
    found: dict[str, list[Figures]] = {}
    nonce = secrets.token_hex(4)
    with ExitStack() as stack:
        servers = {  # each server has its own name for the model
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
                    seed=f"{nonce} {number}",  # both servers read the same texts
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
