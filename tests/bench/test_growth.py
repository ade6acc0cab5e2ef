"""The growth table can be measured at its smallest sizes."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from typer import Typer
from typer.testing import CliRunner

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

SMALLEST = {
    "conversation": [300],
    "blocks": [64],
    "depth": [20],
    "entries": [20],
    "tenants": [1, 3],
    "turns": [2],
}
COSTS = {
    "conversation": {"follow_up_s", "of_which_restoring_s", "written_beside_blocks_bytes"},
    "blocks": {"opening_s", "stats_s", "eviction_s", "stop_s"},
    "depth": {"written_block_s", "block_when_full_s", "stop_s"},
    "entries": {"remembering_s", "collection_s", "pin_check_s"},
    "tenants": {"eviction_s", "authentication_s"},
    "turns": {"first_token_s", "slowest_twentieth_s", "throughput_rate"},
}


@pytest.fixture
def growth(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, which is not in a package."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    served = importlib.import_module("served_growth")
    monkeypatch.setattr(served, "FOLLOW_UPS", 1)
    monkeypatch.setattr(served, "QUIET_S", 0.2)
    return importlib.import_module("growth")


def test_every_row_of_the_table_can_be_measured(growth: ModuleType) -> None:
    assert SMALLEST.keys() == growth.ROWS.keys()
    lines = growth.measure(SMALLEST)
    assert [line.failure for line in lines if line.failure] == []
    assert {line.row: set(line.costs) for line in lines} == COSTS
    assert growth.markdown(lines).count("\n") == 1 + len(lines)


def test_a_row_that_fails_does_not_lose_the_others(
    growth: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(_size: int, _folder: Path) -> dict[str, float]:
        raise OSError("no room left")

    for name, measure in (("blocks", fail), ("tenants", lambda *_: {"eviction_s": 0.002})):
        row = replace(growth.ROWS[name], measure=measure, quick=(1,))
        monkeypatch.setitem(growth.ROWS, name, row)
    monkeypatch.setattr(growth, "ROWS", {name: growth.ROWS[name] for name in ("blocks", "tenants")})
    app = Typer()
    app.command()(growth.main)
    figures = tmp_path / "growth.json"
    result = CliRunner().invoke(app, ["--quick", "--output", str(figures)])
    assert result.exit_code == 1
    assert "| stored blocks | 1 | failed: OSError: no room left |" in result.stdout
    assert "| tenants | 1 | eviction 2 ms |" in result.stdout
    assert '"failure": "OSError: no room left"' in figures.read_text()
