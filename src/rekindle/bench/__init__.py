"""Measures any OpenAI-compatible server over HTTP: how long a turn waits, how fast it writes."""

from rekindle.bench.chart import plot
from rekindle.bench.options import SCENARIO_NAMES, BenchOptions
from rekindle.bench.results import Results, save_json
from rekindle.bench.session import run
from rekindle.bench.stream import BenchFailed
from rekindle.bench.table import print_table

__all__ = [
    "SCENARIO_NAMES",
    "BenchFailed",
    "BenchOptions",
    "Results",
    "plot",
    "print_table",
    "run",
    "save_json",
]
