"""Tokens are counted over many turns, and Rekindle computes none twice."""

from __future__ import annotations

from io import StringIO
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console

from rekindle.bench import BenchOptions, Results, plot, run
from rekindle.bench.rig import TimedTurn
from rekindle.bench.scenarios import Hybrid, least_for
from tests.support.server import running
from tests.support.tiny import write_lfm2

FIRST = TimedTurn(0.1, prompt_tokens=100, completion_tokens=11, cached_tokens=0)
NEXT = TimedTurn(0.1, prompt_tokens=160, completion_tokens=11, cached_tokens=110)
AGAIN = TimedTurn(0.1, prompt_tokens=160, completion_tokens=11, cached_tokens=40)
UNREPORTED = TimedTurn(0.1, prompt_tokens=160, completion_tokens=11, cached_tokens=None)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Hybrid:
    """Our server with a hybrid model, in the eight turns of the bench."""
    folder = tmp_path_factory.mktemp("hybrid")
    model = write_lfm2(folder / "lfm2.gguf", context=8192)
    with running(model, folder, "--threads", "1", "--parallel", "2") as server:
        options = BenchOptions(base_url=server.url, scenarios=("hybrid",), repeats=1, seed="same")
        hybrid = run(options, Console(file=StringIO())).rounds["hybrid"][0]
    assert isinstance(hybrid, Hybrid)
    return hybrid


def known_after(turn: TimedTurn) -> int:
    """The tokens computed by the end of a turn: its prompt, and its reply without the last
    token."""
    return turn.prompt_tokens + turn.completion_tokens - 1


def test_eight_turns_of_a_hybrid_model_compute_no_token_twice(measured: Hybrid) -> None:
    assert len(measured.alone) == 8
    assert measured.figures()["hybrid_computed_tokens"] == least_for(measured.alone)


def test_agents_that_take_turns_continue_from_their_own_state(measured: Hybrid) -> None:
    for turns in measured.agents:
        assert len(turns) == 8
        for earlier, later in pairwise(turns):
            assert later.cached_tokens == known_after(earlier)


def test_a_second_agent_does_not_compute_the_system_prompt_again(measured: Hybrid) -> None:
    first, second = (turns[0] for turns in measured.agents)
    assert second.computed_tokens < first.computed_tokens - BenchOptions(base_url="").agent_tokens


def test_the_minimum_counts_a_reply_without_its_last_token_as_computed() -> None:
    assert least_for([FIRST, NEXT]) == 150
    assert least_for([FIRST, AGAIN]) == 150


def test_tokens_that_the_first_turn_reused_are_not_part_of_the_minimum() -> None:
    found = TimedTurn(0.1, prompt_tokens=100, completion_tokens=11, cached_tokens=6)
    assert least_for([found, NEXT]) == 144


def test_figures_sum_the_computed_tokens_of_all_turns() -> None:
    assert Hybrid((FIRST, NEXT), ((FIRST, AGAIN), (FIRST, NEXT))).figures() == {
        "hybrid_computed_tokens": 150,
        "hybrid_agents_computed_tokens": 370,
        "hybrid_least_tokens": 150,
    }


def test_computed_tokens_are_counted_only_if_they_are_reported() -> None:
    figures = Hybrid((FIRST, UNREPORTED), ((FIRST, NEXT),)).figures()
    assert figures == {"hybrid_least_tokens": 150}


def test_a_bench_without_times_is_not_plotted(tmp_path: Path) -> None:
    results = Results("a", "m", True, {"hybrid": [Hybrid((FIRST,), ((FIRST,),))]})
    plot([results], tmp_path / "bench.png")
    assert not (tmp_path / "bench.png").exists()
