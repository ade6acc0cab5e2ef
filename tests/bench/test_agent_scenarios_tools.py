"""In tool loops all servers read the same histories, and the cold round does not count."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from io import StringIO
from itertools import groupby
from pathlib import Path
from typing import Any

import orjson
import pytest
from rich.console import Console

from rekindle.bench import BenchOptions, Results, run
from rekindle.bench.agent_scenarios import TOOLS, ToolLoop
from rekindle.bench.rig import TimedTurn
from tests.bench.fake_openai import FakeOpenAI

Serve = Callable[[FakeOpenAI], str]

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
COLD = TimedTurn(8.0, prompt_tokens=900, completion_tokens=10, cached_tokens=0)
WARM = TimedTurn(0.2, prompt_tokens=1000, completion_tokens=10, cached_tokens=900)
SLOW = TimedTurn(0.6, prompt_tokens=1100, completion_tokens=10, cached_tokens=1000)
FULL, LESS = ToolLoop(((COLD,), (SLOW,))), ToolLoop(((COLD,), (WARM,)))
UNREPORTED = TimedTurn(0.2, prompt_tokens=1000, completion_tokens=10, cached_tokens=None)


def sent(serve: Serve, fake: FakeOpenAI) -> list[dict[str, Any]]:
    """The requests with tools that a fake received from three agents in three rounds."""
    options = BenchOptions(
        base_url=serve(fake),
        scenarios=("toolloop",),
        repeats=1,
        seed="the same words every time",
        agents=3,
        agent_tokens=30,
        agent_rounds=3,
        tool_result_tokens=10,
    )
    run(options, Console(file=StringIO()))
    return [body for body in fake.bodies if "tools" in body]


def test_agents_take_turns_and_send_the_same_tools(serve: Serve) -> None:
    bodies = sent(serve, FakeOpenAI())
    systems = [body["messages"][0]["content"] for body in bodies]
    assert len(set(systems)) == 3
    assert systems == systems[:3] * 3
    for body in bodies:
        assert body["tools"] == list(TOOLS)
        assert body["tool_choice"] == "none"


def test_each_round_adds_a_call_and_its_result(serve: Serve) -> None:
    bodies = sent(serve, FakeOpenAI())
    by_round = [list(group) for _, group in groupby(bodies, lambda body: len(body["messages"]))]
    assert [len(group) for group in by_round] == [3, 3, 3]
    roles = [message["role"] for message in by_round[-1][0]["messages"]]
    assert roles == ["system", "user", "assistant", "tool", "assistant", "tool"]


def test_a_call_names_a_tool_and_its_result_names_the_call(serve: Serve) -> None:
    history = sent(serve, FakeOpenAI())[-1]["messages"]
    names = {tool["function"]["name"] for tool in TOOLS}
    calls = [message["tool_calls"][0] for message in history if message["role"] == "assistant"]
    results = [message["tool_call_id"] for message in history if message["role"] == "tool"]
    assert [call["id"] for call in calls] == results
    assert len(set(results)) == 2
    for call in calls:
        assert call["function"]["name"] in names
        assert orjson.loads(call["function"]["arguments"]).keys() == {"place"}


def test_a_history_only_grows(serve: Serve) -> None:
    """Each request of an agent is a prefix of its next request."""
    bodies = sent(serve, FakeOpenAI())
    for earlier, later in zip(bodies, bodies[3:], strict=False):
        known = earlier["messages"]
        assert later["messages"][: len(known)] == known


def test_servers_that_answer_differently_read_the_same_histories(serve: Serve) -> None:
    one = sent(serve, FakeOpenAI())
    other = sent(serve, FakeOpenAI(reply_word="another"))
    assert [body["messages"] for body in one] == [body["messages"] for body in other]


def test_a_comparison_notes_when_a_server_read_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that leaves tools out of its prompts has less work."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    report, targets = importlib.import_module("report"), importlib.import_module("targets")
    full, less = (Results("a", "m", True, {"toolloop": [loop]}) for loop in (FULL, LESS))
    for theirs, is_reported in ((full, False), (less, True)):
        output = StringIO()
        comparison = targets.Comparison(full, theirs, [], [])
        report.print_comparison(comparison, Console(file=output, width=200))
        assert ("prompts differ, 1100 tokens and 1000" in output.getvalue()) == is_reported


def test_the_cold_round_is_left_out_of_the_warm_figures() -> None:
    figures = ToolLoop(((COLD, COLD), (WARM, SLOW), (WARM, WARM))).figures()
    assert figures == {
        "toolloop_cold_s": 8.0,
        "toolloop_warm_s": pytest.approx(0.2),
        "toolloop_worst_s": 0.6,
        "toolloop_prompt_tokens": 4100,
        "toolloop_computed_tokens": 400,
    }


def test_computed_tokens_are_counted_only_when_they_are_reported() -> None:
    figures = ToolLoop(((COLD,), (WARM, UNREPORTED))).figures()
    assert "toolloop_computed_tokens" not in figures
    assert figures["toolloop_prompt_tokens"] == 2000
