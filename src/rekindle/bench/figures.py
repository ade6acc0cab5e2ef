"""The figures a bench reports: their names, units, and how repeats become one number."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median
from typing import Literal

Unit = Literal["s", "tokens/s", "tokens", "x"]


@dataclass(frozen=True, slots=True)
class Figure:
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
    "warm_front_s": Figure("  turn 2: HTTP, validation, into the runtime", "s"),
    "warm_encode_s": Figure("  turn 2: render and tokenise", "s"),
    "warm_queue_s": Figure("  turn 2: wait for its place", "s"),
    "warm_plan_s": Figure("  turn 2: find and plan reuse", "s"),
    "warm_restore_s": Figure("  turn 2: fetch and restore state", "s"),
    "warm_compute_s": Figure("  turn 2: compute new tokens, sample one", "s"),
    "warm_first_byte_s": Figure("  turn 2: first token to first byte", "s"),
    "warm_rest_s": Figure("  turn 2: network and this client", "s"),
    "document_wall_s": Figure("document: all questions answered", "s"),
    "document_computed_tokens": Figure("document: prompt tokens computed", "tokens"),
    "agents_cold_s": Figure("agents: first token, cold", "s"),
    "agents_warm_s": Figure("agents: first token, warm", "s"),
    "agents_worst_s": Figure("agents: first token, warm, worst", "s", max),
    "decode_single_tokens_per_s": Figure("decode: one stream", "tokens/s"),
    "decode_together_tokens_per_s": Figure("decode: streams together", "tokens/s"),
    "schema_tokens_per_s": Figure("schema: one stream", "tokens/s"),
    "schema_over_free": Figure("schema: a token with a schema / without", "x"),
    "toolloop_cold_s": Figure("tool loop: first token, cold", "s"),
    "toolloop_warm_s": Figure("tool loop: first token, warm", "s"),
    "toolloop_worst_s": Figure("tool loop: first token, warm, worst", "s", max),
    "toolloop_prompt_tokens": Figure("tool loop: prompt tokens, warm", "tokens"),
    "toolloop_computed_tokens": Figure("tool loop: prompt tokens computed, warm", "tokens"),
    "hybrid_computed_tokens": Figure("hybrid: prompt tokens computed", "tokens"),
    "hybrid_least_tokens": Figure("hybrid: were none computed twice", "tokens"),
    "hybrid_agents_computed_tokens": Figure("hybrid: computed, two agents by turns", "tokens"),
}

# What the fresh short prompt is, for whoever reads a table.
FRESH_NOTE = (
    "Fresh short prompt: a new prompt of which as many tokens are computed as of turn 2, with next "
    "to no context before them; less work than turn 2 can ever be."
)
