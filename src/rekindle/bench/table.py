"""The results as a table in the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from rekindle.bench.figures import FIGURES, FRESH_NOTE
from rekindle.bench.results import Results


def print_table(results: Results, console: Console) -> None:
    """One row a figure, and what a reader must know to read them."""
    table = Table(title=f"{results.label} · {results.model}", title_justify="left")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in results.figures().items():
        table.add_row(FIGURES[name].label, FIGURES[name].show(value))
    console.print(table)
    if "article" in results.rounds:
        console.print(FRESH_NOTE)
    if not results.ignores_eos:
        console.print("This server takes no ignore_eos: replies may be shorter than asked for.")
