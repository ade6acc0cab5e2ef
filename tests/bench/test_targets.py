from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

from rekindle.bench.results import Results
from rekindle.bench.rig import TimedTurn
from rekindle.bench.scenarios import Article, Decode

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def targets(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module next to `peers.py`, which is a script and not a package."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("targets")


def decodes(label: str, *speeds: float) -> Results:
    return Results(label, "m", True, {"decode": [Decode(speed, speed, 8) for speed in speeds]})


def article(second_s: float) -> Results:
    turn = TimedTurn(second_s, 10, 1, 0)
    return Results(
        "a", "m", True, {"article": [Article(TimedTurn(5.0, 10, 1, 0), turn, turn, turn)]}
    )


def test_a_ratio_is_the_median_of_paired_rounds(targets: ModuleType) -> None:
    ours, theirs = decodes("ours", 10, 40, 9), decodes("theirs", 10, 50, 10)
    comparison = targets.Comparison(ours, theirs, [], [])
    single = next(t for t in targets.TARGETS if "one stream" in t.label)
    assert single.ratio(comparison) == pytest.approx(0.9)
    assert not single.is_met(comparison)


def test_only_the_scenarios_that_ran_have_targets(targets: ModuleType) -> None:
    comparison = targets.Comparison(decodes("ours", 1), decodes("theirs", 1), [], [])
    assert {target.scenario for target in targets.reached_by(comparison)} == {"decode"}


def test_turn_two_is_compared_with_its_new_tokens_in_place_and_with_turn_one(
    targets: ModuleType,
) -> None:
    comparison = targets.Comparison(article(0.2), article(0.2), [0.1], [])
    in_place, cold = targets.reached_by(comparison)
    assert in_place.ratio(comparison) == pytest.approx(2)
    assert not in_place.is_met(comparison)
    assert cold.ratio(comparison) == pytest.approx(25)
    assert cold.is_met(comparison)
