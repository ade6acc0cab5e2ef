"""Draws the results of a bench: in the terminal, as an image, or as a page without other files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from rich.bar import Bar
from rich.console import Console, RenderableType
from rich.table import Table

from rekindle.bench.client import BenchFailed
from rekindle.bench.results import (
    FIGURES,
    TITLES,
    Figure,
    Results,
    Unit,
    shown_in_other_rows,
    uncached_names,
)

NO_MATPLOTLIB = (
    "an image needs matplotlib: run `pip install matplotlib`, or use --html, which needs nothing"
)
LOGARITHMIC = " (logarithmic)"  # only in the image
VALUE_CELLS = 16  # for the longest value and the spaces around it
STYLE = """
body { font: 15px system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; color: #222; }
table { border-collapse: collapse; width: 100%; margin-bottom: 2rem; }
td { padding: 2px 8px; } td.value { text-align: right; white-space: nowrap; }
td.bar { width: 45%; } td.bar div { background: #3a78b5; height: 1em; min-width: 1px; }
"""


def print_chart(results: Results, console: Console) -> None:
    """Draw times and speeds as bars, as wide as the terminal allows."""
    figures = results.figures()
    for unit, heading in TITLES.items():
        names = _measured([results], unit)
        if not names:
            continue
        values = {name: value for name, value in figures.items() if FIGURES[name].unit == unit}
        largest = max(values.values())
        chart = Table.grid(padding=(0, 1))
        chart.add_column(overflow="fold")
        chart.add_column(no_wrap=True, style="cyan", width=_bar_cells(names, console.width))
        chart.add_column(no_wrap=True, justify="right")
        for name in names:
            chart.add_row(FIGURES[name].label, *_drawn(name, figures[name] / largest, figures))
            uncached, _ = uncached_names(name)
            if uncached in values:
                bar, value = _drawn(uncached, figures[uncached] / largest, figures)
                chart.add_row("  without the cache", bar, value, style="dim")
        console.print(f"\n{heading.removesuffix(LOGARITHMIC)}", style="bold")
        console.print(chart)


def _bar_cells(names: Sequence[str], width: int) -> int:
    """Leave room for the labels and the values, but at least ten cells for the bars."""
    labels = max(len(FIGURES[name].label) for name in names)
    return max(width - labels - VALUE_CELLS, 10)


def _drawn(name: str, share: float, figures: Mapping[str, float]) -> tuple[RenderableType, str]:
    return Bar(1.0, 0.0, share), FIGURES[name].show(figures[name])


def require_matplotlib() -> None:
    """Raise BenchFailed if images cannot be drawn. Call it before measuring."""
    try:
        import matplotlib.figure  # noqa: F401  # slow, so only where an image is wanted
    except ImportError:
        raise BenchFailed(NO_MATPLOTLIB) from None


def write_page(results: Sequence[Results], path: Path) -> None:
    """Write tables with bars as a page without scripts."""
    title = " and ".join(escape(f"{each.label} · {each.model}") for each in results)
    parts = [
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>',
        f"<style>{STYLE}</style><h1>{title}</h1>",
        *(part for unit, heading in TITLES.items() for part in _panel(results, unit, heading)),
        "</html>\n",
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(parts), encoding="utf-8")


def _panel(results: Sequence[Results], unit: Unit, heading: str) -> Iterator[str]:
    names = _measured(results, unit)
    if not names:
        return
    figures = [each.figures() for each in results]
    largest = max(each[name] for each in figures for name in names)
    yield f"<h2>{escape(heading.removesuffix(LOGARITHMIC))}</h2><table>"
    for name in names:
        for server, measured in zip(results, figures, strict=True):
            share = 100 * measured[name] / largest if largest > 0 else 0
            label = FIGURES[name].label + (f" ({server.label})" if len(results) > 1 else "")
            yield (
                f"<tr><td>{escape(label)}</td>"
                f'<td class="value">{FIGURES[name].show(measured[name])}</td>'
                f'<td class="bar"><div style="width:{share:.1f}%"></div></td></tr>'
            )
    yield "</table>"


def plot(results: Sequence[Results], path: Path) -> None:
    """Draw times and speeds of all servers into an image file."""
    try:
        from matplotlib.figure import Figure  # optional, and slow to import
    except ImportError as error:
        raise BenchFailed(NO_MATPLOTLIB) from error
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
    """The figures with this unit that all servers have and that get their own row."""
    found = [server.figures() for server in results]
    names = [n for n in FIGURES if FIGURES[n].unit == unit and all(n in each for each in found)]
    beside = shown_in_other_rows(names)
    return [name for name in names if name not in beside]


def _draw(axes: Any, results: Sequence[Results], names: Sequence[str]) -> None:
    height = 0.8 / len(results)
    for number, server in enumerate(results):
        places = [row + number * height for row in range(len(names))]
        figures = server.figures()
        values = [figures[name] for name in names]
        bars = axes.barh(places, values, height, label=server.label)
        shown = [FIGURES[name].show(value) for name, value in zip(names, values, strict=True)]
        axes.bar_label(bars, shown, padding=3)
        uncached = [
            (place, figures[other])
            for place, name in zip(places, names, strict=True)
            if (other := uncached_names(name)[0]) in figures
        ]
        _draw_uncached(axes, uncached, height, bars.patches[0].get_facecolor(), server.label)
    middle = 0.4 - height / 2
    axes.set_yticks([row + middle for row in range(len(names))], [FIGURES[n].label for n in names])
    axes.margins(x=0.2)  # space for the number at the longest bar
    axes.invert_yaxis()


def _draw_uncached(
    axes: Any, places: Sequence[tuple[int | float, float]], height: float, colour: Any, label: str
) -> None:
    """Draw the times without the cache as pale bars in the rows of the times with it."""
    if not places:
        return
    rows, values = zip(*places, strict=True)
    bars = axes.barh(
        rows, values, height, color=colour, alpha=0.3, zorder=0, label=f"{label}, no cache"
    )
    axes.bar_label(bars, [Figure("", "s").show(value) for value in values], padding=3)
