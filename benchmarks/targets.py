"""States the targets of Rekindle compared with llama.cpp's own server, and checks them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from machine import Load

from rekindle.bench import Results

COMPARE = {"<=": operator.le, "<": operator.lt, ">=": operator.ge}


@dataclass(frozen=True, slots=True)
class Comparison:
    """Rounds of both servers, measured in turns. Rounds with the same number form a pair."""

    ours: Results
    theirs: Results
    in_place_s: Sequence[float]  # one per round of the article scenario
    loads: Sequence[Load]


@dataclass(frozen=True, slots=True)
class Target:
    label: str
    scenario: str
    ratios: Callable[[Comparison], list[float]]  # one value per round
    sign: str
    bound: float

    def ratio(self, comparison: Comparison) -> float:
        return median(self.ratios(comparison))

    def is_met(self, comparison: Comparison) -> bool:
        return bool(COMPARE[self.sign](self.ratio(comparison), self.bound))


def _column(results: Results, scenario: str, figure: str) -> list[float]:
    return [measured.figures()[figure] for measured in results.rounds[scenario]]


def _over_peer(scenario: str, figure: str) -> Callable[[Comparison], list[float]]:
    def ratios(comparison: Comparison) -> list[float]:
        ours = _column(comparison.ours, scenario, figure)
        theirs = _column(comparison.theirs, scenario, figure)
        return [mine / other for mine, other in zip(ours, theirs, strict=True)]

    return ratios


def _over_in_place(comparison: Comparison) -> list[float]:
    turns_s = _column(comparison.ours, "article", "article_turn2_s")
    return [turn / alone for turn, alone in zip(turns_s, comparison.in_place_s, strict=True)]


def _cold_over_warm(comparison: Comparison) -> list[float]:
    return _column(comparison.ours, "article", "article_turn1_over_turn2")


def _schema_cost(comparison: Comparison) -> list[float]:
    return _column(comparison.ours, "schema", "schema_over_free")


TARGETS = (
    Target("turn 2 / just its new tokens, context in place", "article", _over_in_place, "<=", 1.3),
    Target("turn 1 / turn 2", "article", _cold_over_warm, ">=", 20),
    Target(
        "shared document, wall time, ours / theirs",
        "document",
        _over_peer("document", "document_wall_s"),
        "<=",
        0.35,
    ),
    Target(
        "agents, median warm first token, ours / theirs",
        "agents",
        _over_peer("agents", "agents_warm_s"),
        "<",
        1,
    ),
    Target(
        "pictures, first token of a second question, ours / theirs",
        "pictures",
        _over_peer("pictures", "pictures_second_s"),
        "<=",
        1,
    ),
    Target(
        "pictures, first token of another conversation, ours / theirs",
        "pictures",
        _over_peer("pictures", "pictures_other_s"),
        "<=",
        1,
    ),
    Target("a token with a schema / without", "schema", _schema_cost, "<=", 1.5),
    Target(
        "tool loop, median warm first token, ours / theirs",
        "toolloop",
        _over_peer("toolloop", "toolloop_warm_s"),
        "<",
        1,
    ),
    Target(
        "tool loop, worst warm first token, ours / theirs",
        "toolloop",
        _over_peer("toolloop", "toolloop_worst_s"),
        "<",
        1,
    ),
    Target(
        "hybrid, tokens computed, ours / theirs",
        "hybrid",
        _over_peer("hybrid", "hybrid_computed_tokens"),
        "<=",
        1,
    ),
    Target(
        "hybrid, two agents, tokens computed, ours / theirs",
        "hybrid",
        _over_peer("hybrid", "hybrid_agents_computed_tokens"),
        "<=",
        1,
    ),
    Target(
        "decode, one stream, ours / theirs",
        "decode",
        _over_peer("decode", "decode_single_tokens_per_s"),
        ">=",
        0.95,
    ),
    Target(
        "decode, streams together, ours / theirs",
        "decode",
        _over_peer("decode", "decode_together_tokens_per_s"),
        ">=",
        0.95,
    ),
    Target(
        "sampled, one stream, ours / theirs",
        "sampled",
        _over_peer("sampled", "sampled_single_tokens_per_s"),
        ">=",
        0.95,
    ),
    Target(
        "sampled, streams together, ours / theirs",
        "sampled",
        _over_peer("sampled", "sampled_together_tokens_per_s"),
        ">=",
        0.95,
    ),
    Target(
        "crowd, median first token of a kept conversation, ours / theirs",
        "crowd",
        _over_peer("crowd", "crowd_again_s"),
        "<=",
        1,
    ),
)


def reached_by(comparison: Comparison) -> list[Target]:
    """The targets of the scenarios that were run."""
    return [target for target in TARGETS if target.scenario in comparison.ours.rounds]
