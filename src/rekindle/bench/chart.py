"""The results as bars, one colour a server."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rekindle.bench.figures import FIGURES, Unit
from rekindle.bench.results import Results
from rekindle.bench.stream import BenchFailed

PANELS: dict[Unit, str] = {
    "s": "seconds, shorter is better (logarithmic)",
    "tokens/s": "tokens a second, longer is better",
}


def plot(results: Sequence[Results], path: Path) -> None:
    """Draw waiting times and speeds side by side into an image file."""
    try:
        from matplotlib.figure import Figure  # not needed to serve or measure, and slow to import
    except ImportError as error:
        raise BenchFailed("a plot needs matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(10, 7), layout="constrained")
    panels = figure.subplots(len(PANELS), 1, height_ratios=(3, 1))
    for axes, (unit, title) in zip(panels, PANELS.items(), strict=True):
        _draw(axes, results, unit)
        axes.set_title(title, loc="left")
    panels[0].set_xscale("log")
    panels[0].legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _draw(axes: Any, results: Sequence[Results], unit: Unit) -> None:
    measured = [server.figures() for server in results]
    names = [
        n for n in FIGURES if FIGURES[n].unit == unit and any(n in found for found in measured)
    ]
    height = 0.8 / len(results)
    for number, (server, found) in enumerate(zip(results, measured, strict=True)):
        rows = [row + number * height for row in range(len(names))]
        axes.barh(rows, [found.get(name, 0) for name in names], height, label=server.label)
    middle = 0.4 - height / 2
    axes.set_yticks([row + middle for row in range(len(names))], [FIGURES[n].label for n in names])
    axes.invert_yaxis()
