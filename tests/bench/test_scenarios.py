from __future__ import annotations

import pytest

from rekindle.bench.agent_scenarios import Schema
from rekindle.bench.client import BenchFailed, StreamedReply, Usage
from rekindle.bench.rig import TimedTurn
from rekindle.bench.scenarios import (
    Agents,
    Article,
    Crowd,
    SharedDocument,
    computed_in,
    tokens_per_s,
)

COLD = TimedTurn(8.0, prompt_tokens=1500, completion_tokens=10, cached_tokens=0)
WARM = TimedTurn(0.2, prompt_tokens=1530, completion_tokens=10, cached_tokens=1508)
UNREPORTED = TimedTurn(0.2, prompt_tokens=1530, completion_tokens=10, cached_tokens=None)


def streamed(first_s: float, last_s: float, tokens: int) -> StreamedReply:
    return StreamedReply("", 0.0, first_s, last_s, Usage(5, tokens, None))


def test_turn_two_computed_the_tokens_that_were_not_reported_as_cached() -> None:
    assert computed_in(COLD, WARM) == 22


def test_without_a_report_turn_two_computed_the_tokens_that_it_added() -> None:
    assert computed_in(COLD, UNREPORTED) == 20


def test_an_article_has_both_ratios() -> None:
    figures = Article(COLD, WARM, WARM, TimedTurn(0.1, 40, 10, 18)).figures()
    assert figures["article_turn1_over_turn2"] == pytest.approx(40)
    assert figures["article_turn2_over_reference"] == pytest.approx(2)
    assert figures["article_turn2_new_tokens"] == 20


def test_a_document_counts_computed_tokens_only_if_they_are_reported() -> None:
    assert SharedDocument(1.0, (COLD, WARM)).figures()["document_computed_tokens"] == 1522
    assert "document_computed_tokens" not in SharedDocument(1.0, (COLD, UNREPORTED)).figures()


def test_the_warm_figures_of_agents_exclude_the_cold_round() -> None:
    late = TimedTurn(0.6, 1, 1, 0)
    figures = Agents(((COLD, COLD), (WARM, late), (WARM, WARM))).figures()
    assert figures == {"agents_cold_s": 8.0, "agents_warm_s": 0.2, "agents_worst_s": 0.6}


def test_speed_excludes_the_first_token_of_each_stream() -> None:
    assert tokens_per_s([streamed(1.0, 3.0, 21)]) == pytest.approx(10)
    assert tokens_per_s([streamed(1.0, 3.0, 21), streamed(2.0, 5.0, 21)]) == pytest.approx(10)


def test_a_speed_needs_more_than_one_token() -> None:
    with pytest.raises(BenchFailed, match="too short"):
        tokens_per_s([streamed(1.0, 1.0, 1)])


def test_the_cost_of_a_schema_is_the_time_that_it_adds_per_token() -> None:
    figures = Schema(free_tokens_per_s=90, schema_tokens_per_s=60).figures()
    assert figures["schema_over_free"] == pytest.approx(1.5)


def test_a_crowd_counts_computed_tokens_only_if_they_are_reported() -> None:
    figures = Crowd(again=(WARM, COLD, WARM), fresh=(COLD,)).figures()
    assert (figures["crowd_again_s"], figures["crowd_worst_s"]) == (0.2, 8.0)
    assert (figures["crowd_fresh_s"], figures["crowd_computed_tokens"]) == (8.0, 1544)
    assert "crowd_computed_tokens" not in Crowd((UNREPORTED,), (COLD,)).figures()
