"""Implements `make clients`, which measures how much third-party programs reuse of their prompts.

Each program takes a first turn with a tool call, a second turn, and a turn in a second session in
the same folder. The exit status is 1 if a program met a protocol error, called no tool or reused
too little. The figures are for docs/clients.md.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.server import running
from tools.clients.figures import Turn, turn_of
from tools.clients.model import write_model
from tools.clients.programs import PROGRAMS, Program, ProgramFailed
from tools.clients.recorder import Exchange, Recorder, recording

STAGES = ("first turn", "second turn", "second session")


@dataclass
class Outcome:
    """The results of a program's three turns."""

    program: type[Program]
    turns: dict[str, list[Turn]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def add(self, stage: str, exchanges: Sequence[Exchange]) -> None:
        found = [turn for turn in map(turn_of, exchanges) if turn is not None]
        # Side requests have no tools. Count them only if no request has tools.
        self.turns[stage] = [turn for turn in found if turn.has_tools] or found
        self.problems += [
            f"{stage}: {each.method} {each.path}: {each.status} {each.answer[:500]}"
            for each in exchanges
            if each.failed
        ]
        if not found:
            self.problems.append(f"{stage}: the model sent no answer")

    def check(self) -> None:
        for stage, least in (
            ("second turn", self.program.second_turn),
            ("second session", self.program.second_session),
        ):
            turns = self.turns.get(stage)
            if turns and turns[0].share < least:
                self.problems.append(f"{stage}: {turns[0].share:.1%} reused, less than {least:.0%}")
        if self.program.tool and len(self.turns.get("first turn", ())) < 2:
            self.problems.append(f"first turn: the tool {self.program.tool} returned no result")

    def report(self) -> None:
        for stage, turns in self.turns.items():
            for turn in turns:
                counts = f"{turn.reused_tokens:,} of {turn.prompt_tokens:,} tokens reused"
                changed = f"; normalised: {', '.join(turn.normalised)}" if turn.normalised else ""
                print(f"{self.program.name}, {stage}: {counts} ({turn.share:.1%}){changed}")
        for problem in self.problems:
            print(f"{self.program.name}: {problem}")


def try_out(
    kind: type[Program], installed: Path, folder: Path, url: str, seen: Recorder
) -> Outcome:
    outcome = Outcome(kind)
    seen.forced = kind.tool
    try:
        with contextlib.closing(kind(installed, folder, url, seen.ended_exchanges)) as program:
            for stage in STAGES:
                before = len(seen.exchanges)
                try:
                    program.say(f"Say {stage}.", resumes=stage == "second turn")
                finally:
                    outcome.add(stage, seen.exchanges[before:])
    except ProgramFailed as error:
        outcome.problems.append(str(error))
    outcome.check()
    outcome.report()
    return outcome


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("installed", type=Path, help="folder with the installed programs")
    parser.add_argument("--only", default="", help="run only programs with this in their name")
    options = parser.parse_args()
    chosen = [kind for kind in PROGRAMS if options.only.lower() in kind.name.lower()]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with (
            running(write_model(folder / "tiny.gguf"), folder) as server,
            recording(server.url) as (url, recorder),
        ):
            outcomes = [
                try_out(kind, options.installed, folder / kind.__name__, url, recorder)
                for kind in chosen
            ]
    if any(outcome.problems for outcome in outcomes):
        raise SystemExit("protocol errors, or too little was reused")


if __name__ == "__main__":
    main()
