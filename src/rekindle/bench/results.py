"""What a bench found: every round as measured, and one number for each figure."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

from rekindle.bench.agents import Agents
from rekindle.bench.article import Article
from rekindle.bench.decode import Decode
from rekindle.bench.document import Document
from rekindle.bench.figures import FIGURES
from rekindle.bench.hybrid import Hybrid
from rekindle.bench.schema import Schema
from rekindle.bench.toolloop import ToolLoop
from rekindle.version import __version__

Round = Article | Document | Agents | Decode | Schema | ToolLoop | Hybrid


@dataclass(frozen=True, slots=True)
class Results:
    label: str
    model: str
    ignores_eos: bool
    rounds: Mapping[str, Sequence[Round]]  # by scenario, in the order measured

    def figures(self) -> dict[str, float]:
        """Each figure over all rounds of its scenario, in the order of FIGURES."""
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
            "bench_version": __version__,
            "machine": platform.machine(),
            "figures": self.figures(),
            "rounds": {
                name: [asdict(measured) for measured in rounds]
                for name, rounds in self.rounds.items()
            },
        }


def save_json(results: Results, path: Path) -> None:
    """Write the results whole; parent folders are made."""
    write_json(results.as_json(), path)


def write_json(content: Mapping[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(orjson.dumps(content, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
