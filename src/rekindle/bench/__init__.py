"""Measures any OpenAI-compatible server over HTTP: time to first token and decode speed."""

from rekindle.bench.charts import plot, print_chart, require_matplotlib, write_page
from rekindle.bench.client import SCENARIO_NAMES, BenchFailed, BenchOptions, quick_options
from rekindle.bench.results import Results, print_table, save_json
from rekindle.bench.session import run

__all__ = [
    "SCENARIO_NAMES",
    "BenchFailed",
    "BenchOptions",
    "Results",
    "plot",
    "print_chart",
    "print_table",
    "quick_options",
    "require_matplotlib",
    "run",
    "save_json",
    "write_page",
]
