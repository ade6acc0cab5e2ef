"""Summarises the rounds of a bench as figures, and writes them as table, JSON and chart."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

import orjson
from rich.console import Console
from rich.table import Table

from rekindle.bench.rig import Round
from rekindle.version import __version__

Unit = Literal["s", "tokens/s", "tokens", "x"]


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of the report: its label, its unit, and how repeats are reduced to one value."""

    label: str
    unit: Unit
    reduce: Callable[[Iterable[float]], float] = median

    def show(self, value: float) -> str:
        match self.unit:
            case "s" if abs(value) < 0.01:
                return f"{value * 1000:.2f} ms"
            case "s":
                return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.2f} s"
            case "x":
                return f"{value:.2f}x"
            case "tokens":
                return f"{value:.0f}"
            case "tokens/s":
                return f"{value:.1f} tokens/s"


FIGURES = {
    "article_turn1_s": Figure("article: first token, turn 1 (cold)", "s"),
    "article_turn2_s": Figure("article: first token, turn 2", "s"),
    "article_turn3_s": Figure("article: first token, turn 3", "s"),
    "article_reference_s": Figure("article: first token, fresh short prompt", "s"),
    "article_turn1_over_turn2": Figure("article: turn 1 / turn 2", "x"),
    "article_turn2_over_reference": Figure("article: turn 2 / fresh short prompt", "x"),
    "article_turn2_new_tokens": Figure("article: tokens added by turn 2", "tokens"),
    "article_turn2_computed_tokens": Figure("article: tokens computed by turn 2", "tokens"),
    "warm_front_s": Figure("  turn 2: HTTP, validation, way into the runtime", "s"),
    "warm_encode_s": Figure("  turn 2: render and tokenise", "s"),
    "warm_queue_s": Figure("  turn 2: wait for admission", "s"),
    "warm_plan_s": Figure("  turn 2: find and plan reuse", "s"),
    "warm_restore_s": Figure("  turn 2: fetch and restore state", "s"),
    "warm_compute_s": Figure("  turn 2: compute new tokens, sample one", "s"),
    "warm_first_byte_s": Figure("  turn 2: first token to first byte", "s"),
    "warm_rest_s": Figure("  turn 2: network and this client", "s"),
    "savings_cold_s": Figure("savings: first token, turn 1 (cold)", "s"),
    "savings_cold_uncached_s": Figure("savings: turn 1 (cold), no cache", "s"),
    "savings_cold_speedup": Figure("savings: turn 1 (cold), no cache / cache", "x"),
    "savings_prewarmed_s": Figure("savings: first token, turn 1 (pre-warmed)", "s"),
    "savings_prewarmed_uncached_s": Figure("savings: turn 1 (pre-warmed), no cache", "s"),
    "savings_prewarmed_speedup": Figure("savings: turn 1 (pre-warmed), no cache / cache", "x"),
    "savings_second_s": Figure("savings: first token, turn 2", "s"),
    "savings_second_uncached_s": Figure("savings: turn 2, no cache", "s"),
    "savings_second_speedup": Figure("savings: turn 2, no cache / cache", "x"),
    "savings_third_s": Figure("savings: first token, turn 3", "s"),
    "savings_third_uncached_s": Figure("savings: turn 3, no cache", "s"),
    "savings_third_speedup": Figure("savings: turn 3, no cache / cache", "x"),
    "document_wall_s": Figure("document: all questions answered", "s"),
    "document_computed_tokens": Figure("document: prompt tokens computed", "tokens"),
    "agents_cold_s": Figure("agents: first token, cold", "s"),
    "agents_warm_s": Figure("agents: first token, warm", "s"),
    "agents_worst_s": Figure("agents: first token, warm, worst", "s", max),
    "decode_single_tokens_per_s": Figure("decode: one stream", "tokens/s"),
    "decode_together_tokens_per_s": Figure("decode: streams together", "tokens/s"),
    "sampled_single_tokens_per_s": Figure("sampled: one stream", "tokens/s"),
    "sampled_together_tokens_per_s": Figure("sampled: streams together", "tokens/s"),
    "crowd_again_s": Figure("crowd: first token, kept conversation", "s"),
    "crowd_worst_s": Figure("crowd: first token, kept conversation, worst", "s", max),
    "crowd_fresh_s": Figure("crowd: first token, new conversation", "s"),
    "crowd_computed_tokens": Figure("crowd: prompt tokens computed, kept conversations", "tokens"),
    "schema_tokens_per_s": Figure("schema: one stream", "tokens/s"),
    "schema_over_free": Figure("schema: time per token, with schema / without", "x"),
    "pictures_first_s": Figure("pictures: first token, first question", "s"),
    "pictures_second_s": Figure("pictures: first token, second question", "s"),
    "pictures_other_s": Figure("pictures: first token, another conversation", "s"),
    "pictures_second_over_first": Figure("pictures: second question / first", "x"),
    "toolloop_cold_s": Figure("tool loop: first token, cold", "s"),
    "toolloop_warm_s": Figure("tool loop: first token, warm", "s"),
    "toolloop_worst_s": Figure("tool loop: first token, warm, worst", "s", max),
    "toolloop_prompt_tokens": Figure("tool loop: prompt tokens, warm", "tokens"),
    "toolloop_computed_tokens": Figure("tool loop: prompt tokens computed, warm", "tokens"),
    "hybrid_computed_tokens": Figure("hybrid: prompt tokens computed", "tokens"),
    "hybrid_least_tokens": Figure("hybrid: minimum, if none is computed twice", "tokens"),
    "hybrid_agents_computed_tokens": Figure("hybrid: prompt tokens computed, two agents", "tokens"),
}

FRESH_NOTE = (
    "Fresh short prompt: a new prompt that computes as many tokens as turn 2, but without a long "
    "context. No server can answer turn 2 faster."
)

TITLES: dict[Unit, str] = {
    "s": "seconds, shorter is better (logarithmic)",
    "tokens/s": "tokens per second, longer is better",
}


@dataclass(frozen=True, slots=True)
class Results:
    label: str
    model: str
    ignores_eos: bool
    rounds: Mapping[str, Sequence[Round]]  # by scenario, in the order of measurement
    scale: float = 1.0  # below 1, texts and replies were shortened to save time

    def figures(self) -> dict[str, float]:
        """Reduce all rounds to one value per figure, in the order of FIGURES."""
        found: dict[str, list[float]] = {}
        for rounds in self.rounds.values():
            for measured in rounds:
                for name, value in measured.figures().items():
                    found.setdefault(name, []).append(value)
        return {name: FIGURES[name].reduce(found[name]) for name in FIGURES if name in found}

    def as_json(self) -> dict[str, Any]:
        return {
            "server": self.label,
            "model": self.model,
            "ignores_eos": self.ignores_eos,
            "scale": self.scale,
            "bench_version": __version__,
            "machine": platform.machine(),
            "figures": self.figures(),
            "rounds": {
                name: [asdict(measured) for measured in rounds]  # type: ignore[call-overload]
                for name, rounds in self.rounds.items()
            },
        }


def save_json(results: Results, path: Path) -> None:
    """Write the results. Missing parent folders are created."""
    write_json(results.as_json(), path)


def write_json(content: Mapping[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(orjson.dumps(content, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


def print_table(results: Results, console: Console) -> None:
    """Print one row per figure, and notes that explain them. A figure that was also measured
    without the cache has both values in its row."""
    figures = results.figures()
    beside = shown_in_other_rows(figures)
    title = f"{results.label} · {results.model}"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("figure", justify="left")
    for column in ("value", "no cache", "speed-up") if beside else ("value",):
        table.add_column(column, justify="right", no_wrap=True)
    for name in figures:
        if name not in beside:
            others = [other if other in beside else None for other in uncached_names(name)]
            shown = [name, *(others if beside else ())]
            cells = [FIGURES[each].show(figures[each]) if each else "" for each in shown]
            table.add_row(FIGURES[name].label, *cells)
    console.print(table)
    if "article" in results.rounds:
        console.print(FRESH_NOTE)
    if results.scale < 1:
        console.print(
            f"Texts and replies have {results.scale:.0%} of their usual length, because this "
            "server is too slow for a quick bench with longer ones."
        )
    if not results.ignores_eos:
        console.print("The server does not support ignore_eos, so replies may be shorter.")


def uncached_names(name: str) -> tuple[str, str]:
    """Names of the two figures in the same row: without the cache, and the speed-up."""
    stem = name.removesuffix("_s")
    return f"{stem}_uncached_s", f"{stem}_speedup"


def shown_in_other_rows(figures: Iterable[str]) -> set[str]:
    """Names of figures that have no row because they are shown in that of another figure."""
    known = set(figures)
    return {other for name in known for other in uncached_names(name)} & known
