"""Prints a comparison as tables, and saves it as JSON and as a plot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median

from machine import Load
from rich.console import Console
from rich.table import Table
from targets import Comparison, Target, reached_by

from rekindle.bench import plot
from rekindle.bench.results import FIGURES, Figure, write_json

IN_PLACE = Figure("article: first token, context in place", "s")
BUSY = 0.1  # share of a core; a round with more is marked as disturbed


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print the figures of both servers, then each target and its result."""
    console.print(_figures(comparison))
    console.print(_targets(comparison))
    for warning in (*_unequal_prompts(comparison), *_warnings(comparison.loads)):
        console.print(warning)


def save(comparison: Comparison, folder: Path) -> None:
    """Write peers.json and peers.png."""
    content = {
        "ours": comparison.ours.as_json(),
        "theirs": comparison.theirs.as_json(),
        "in_place_s": comparison.in_place_s,
        "loads": [asdict(load) for load in comparison.loads],
        "targets": [_as_json(target, comparison) for target in reached_by(comparison)],
    }
    write_json(content, folder / "peers.json")
    plot([comparison.ours, comparison.theirs], folder / "peers.png")


def _figures(comparison: Comparison) -> Table:
    ours, theirs = comparison.ours, comparison.theirs
    table = Table("figure", title=f"{ours.model}, medians", title_justify="left")
    table.add_column(ours.label, justify="right")
    table.add_column(theirs.label, justify="right")
    their_figures = theirs.figures()
    for name, value in ours.figures().items():
        figure = FIGURES[name]
        other = figure.show(their_figures[name]) if name in their_figures else "-"
        table.add_row(figure.label, figure.show(value), other)
    if comparison.in_place_s:
        table.add_row(IN_PLACE.label, "-", IN_PLACE.show(median(comparison.in_place_s)))
    return table


def _targets(comparison: Comparison) -> Table:
    table = Table("target", title="ratios, medians of paired rounds", title_justify="left")
    for column in ("ratio", "rounds", "wanted", ""):
        table.add_column(column, justify="right")
    for target in reached_by(comparison):
        ratios = target.ratios(comparison)
        table.add_row(
            target.label,
            f"{target.ratio(comparison):.2f}",
            f"{min(ratios):.2f} to {max(ratios):.2f}",
            f"{target.sign} {target.bound:g}",
            "[green]met[/]" if target.is_met(comparison) else "[red]missed[/]",
        )
    return table


def _unequal_prompts(comparison: Comparison) -> Iterator[str]:
    """Note that a server which leaves tools out of the prompt reads less."""
    ours = comparison.ours.figures().get("toolloop_prompt_tokens")
    theirs = comparison.theirs.figures().get("toolloop_prompt_tokens")
    if ours != theirs:
        yield (
            f"The tool loop's prompts differ, {ours:.0f} tokens and {theirs:.0f}: the servers did "
            "not write the same tools and calls into them."
        )


def _warnings(loads: Sequence[Load]) -> Iterator[str]:
    disturbed = [load for load in loads if load.foreign_cpu > BUSY]
    if disturbed:
        worst = max(load.foreign_cpu for load in disturbed)
        yield (
            f"Other programs disturbed {len(disturbed)} of {len(loads)} rounds, with up to "
            f"{worst:.0%} of a core: measure again on a quiet machine."
        )
    idle = max((load.idle_cpu for load in loads), default=0)
    if idle > BUSY:
        yield f"A server took {idle:.0%} of a core while it had no work."


def _as_json(target: Target, comparison: Comparison) -> dict[str, object]:
    return {
        "target": target.label,
        "ratio": target.ratio(comparison),
        "ratios": target.ratios(comparison),
        "wanted": f"{target.sign} {target.bound:g}",
        "met": target.is_met(comparison),
    }
