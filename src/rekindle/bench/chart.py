"""The results as bars, one colour a server."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rekindle.bench.figures import FIGURES, Unit
from rekindle.bench.results import Results
from rekindle.bench.stream import BenchFailed

TITLES: dict[Unit, str] = {
    "s": "seconds, shorter is better (logarithmic)",
    "tokens/s": "tokens a second, longer is better",
}


def plot(results: Sequence[Results], path: Path) -> None:
    """Draw waiting times and speeds side by side into an image file, where there are any."""
    try:
        from matplotlib.figure import Figure  # not needed to serve or measure, and slow to import
    except ImportError as error:
        raise BenchFailed("a plot needs matplotlib: pip install matplotlib") from error
    panels = {unit: names for unit in TITLES if (names := _measured(results, unit))}
    if not panels:
        return
    figure = Figure(figsize=(10, 7), layout="constrained")
    heights = [len(names) for names in panels.values()]
    rows = figure.subplots(len(panels), 1, height_ratios=heights, squeeze=False)[:, 0]
    for axes, (unit, names) in zip(rows, panels.items(), strict=True):
        axes.set_title(TITLES[unit], loc="left")
        axes.set_xscale("log" if unit == "s" else "linear")
        _draw(axes, results, names)
    rows[0].legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _measured(results: Sequence[Results], unit: Unit) -> list[str]:
    """The figures of this unit that every server has."""
    found = [server.figures() for server in results]
    return [n for n in FIGURES if FIGURES[n].unit == unit and all(n in each for each in found)]


def _draw(axes: Any, results: Sequence[Results], names: Sequence[str]) -> None:
    height = 0.8 / len(results)
    for number, server in enumerate(results):
        places = [row + number * height for row in range(len(names))]
        values = [server.figures()[name] for name in names]
        bars = axes.barh(places, values, height, label=server.label)
        shown = [FIGURES[name].show(value) for name, value in zip(names, values, strict=True)]
        axes.bar_label(bars, shown, padding=3)
    middle = 0.4 - height / 2
    axes.set_yticks([row + middle for row in range(len(names))], [FIGURES[n].label for n in names])
    axes.margins(x=0.2)  # room for the last bar's number
    axes.invert_yaxis()
