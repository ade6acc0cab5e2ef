"""A comparison as tables, as JSON and as a plot."""

from __future__ import annotations

from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table
from targets import Comparison, Target, reached_by

from rekindle.bench import plot
from rekindle.bench.figures import FIGURES, Figure
from rekindle.bench.results import write_json

IN_PLACE = Figure("article: just turn 2's new tokens, context in place", "s")
BUSY_IDLE = 0.05  # of a core


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Both servers' figures, then each target with what was reached."""
    console.print(_figures(comparison))
    console.print(_targets(comparison))
    if comparison.idle_cpu is not None and comparison.idle_cpu > BUSY_IDLE:
        console.print(f"A server took {comparison.idle_cpu:.0%} of a core while it had no work.")


def save(comparison: Comparison, folder: Path) -> None:
    """Write peers.json and peers.png."""
    content = {
        "ours": comparison.ours.as_json(),
        "theirs": comparison.theirs.as_json(),
        "in_place_s": comparison.in_place_s,
        "idle_cpu": comparison.idle_cpu,
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


def _as_json(target: Target, comparison: Comparison) -> dict[str, object]:
    return {
        "target": target.label,
        "ratio": target.ratio(comparison),
        "ratios": target.ratios(comparison),
        "wanted": f"{target.sign} {target.bound:g}",
        "met": target.is_met(comparison),
    }
