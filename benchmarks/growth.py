"""Measures costs that may grow with the number of conversations, blocks, tenants or turns.

    python benchmarks/growth.py [--quick] [--only ROW]

There is one line per size, so that a cost that is not flat is visible. Each line has its own folder
and, if needed, its own server. A line that fails does not stop the others. The table is Markdown,
and the figures are also written as JSON. Folders are created in TMPDIR. In a file system in memory,
a busy disk does not matter.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from served_growth import concurrent_turns, conversation
from stored_growth import blocks, chain_depth, entries, tenants

from rekindle.bench.results import write_json
from rekindle.models.progress import TaskProgress

FOLDER = Path("bench-results")

Costs = Mapping[str, float]  # by figure; its name ends with its unit


@dataclass(frozen=True, slots=True)
class Row:
    """A quantity that grows, and the function that measures its cost."""

    title: str
    measure: Callable[[int, Path], Costs]
    sizes: Sequence[int]
    quick: Sequence[int]


ROWS = {
    "conversation": Row(
        "tokens in a conversation", conversation, (1_000, 4_000, 16_000, 32_000), (1_000, 4_000)
    ),
    "blocks": Row("stored blocks", blocks, (1_000, 10_000, 100_000, 1_000_000), (1_000, 100_000)),
    "depth": Row("blocks in one chain", chain_depth, (1_000, 10_000, 100_000), (1_000, 10_000)),
    "entries": Row("remembered conversations", entries, (1_000, 10_000, 80_000), (1_000, 10_000)),
    "tenants": Row("tenants", tenants, (1, 10, 100, 1_000, 10_000), (1, 100, 1_000)),
    "turns": Row("concurrent turns", concurrent_turns, (1, 4, 16, 64, 256), (1, 8, 32)),
}


@dataclass(frozen=True, slots=True)
class Line:
    row: str
    size: int
    costs: Costs
    failure: str = ""


def main(
    quick: Annotated[
        bool, typer.Option("--quick", help="Use smaller sizes, which take a minute.")
    ] = False,
    only: Annotated[
        str | None, typer.Option(help=f"Measure only one of {', '.join(ROWS)}.")
    ] = None,
    output: Annotated[Path, typer.Option(help="JSON file for the figures.")] = FOLDER
    / "growth.json",
) -> None:
    """Measure costs at growing sizes."""
    if only is not None and only not in ROWS:
        raise typer.BadParameter(f"there is no row {only}; there are {', '.join(ROWS)}")
    chosen = [only] if only else list(ROWS)
    lines = measure({name: ROWS[name].quick if quick else ROWS[name].sizes for name in chosen})
    print(markdown(lines))
    write_json({"lines": [_as_json(line) for line in lines]}, output)
    if any(line.failure for line in lines):
        raise typer.Exit(1)


def measure(sizes: Mapping[str, Sequence[int]]) -> list[Line]:
    """Measure each row at each of its sizes, smallest first."""
    lines = []
    console = Console(stderr=True)
    with TaskProgress(console) as progress:
        for name, each in sizes.items():
            with progress.task(ROWS[name].title, len(each)) as step:
                for size in sorted(each):
                    lines.append(_measure_one(name, size))
                    step()
    return lines


def _measure_one(name: str, size: int) -> Line:
    with tempfile.TemporaryDirectory(prefix="rekindle-growth-") as folder:
        try:
            return Line(name, size, ROWS[name].measure(size, Path(folder)))
        except Exception as error:  # any failure must not lose the other lines
            print(f"{name} {size}: {type(error).__name__}: {error}", file=sys.stderr)
            return Line(name, size, {}, f"{type(error).__name__}: {error}".splitlines()[0])


def markdown(lines: Sequence[Line]) -> str:
    found = [("grows with", "value", "cost"), ("---", "---:", "---")]
    for line in lines:
        costs = ", ".join(_show(name, value) for name, value in line.costs.items())
        found.append((ROWS[line.row].title, f"{line.size:,}", costs or f"failed: {line.failure}"))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in found)


def _show(name: str, value: float) -> str:
    words, _, unit = name.rpartition("_")
    return f"{words.replace('_', ' ')} {_UNITS[unit](value)}"


def _seconds(value: float) -> str:
    if value >= 1:
        return f"{value:.3g} s"
    return f"{value * 1e3:.3g} ms" if value >= 1e-3 else f"{value * 1e6:.3g} µs"


def _bytes(value: float) -> str:
    return f"{value / 1e3:,.1f} kB"


_UNITS: dict[str, Callable[[float], str]] = {
    "s": _seconds,
    "bytes": _bytes,
    "rate": lambda value: f"{value:,.0f} tokens/s",
}


def _as_json(line: Line) -> dict[str, object]:
    failure = {"failure": line.failure} if line.failure else {}
    return {"row": line.row, "size": line.size, "costs": dict(line.costs), **failure}


if __name__ == "__main__":
    typer.run(main)
