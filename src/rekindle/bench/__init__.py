"""Measures any OpenAI-compatible server over HTTP: time to first token and decode speed."""

from rekindle.bench.client import SCENARIO_NAMES, BenchFailed, BenchOptions
from rekindle.bench.results import Results, plot, print_table, save_json
from rekindle.bench.session import run

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
