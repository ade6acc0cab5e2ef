"""Compares Rekindle with llama.cpp's server and with its raw calls, on a machine with a GPU.

`python benchmarks/gpu/run.py --model 8b --cases idle,streams --raw --ours --peer`; see README.md.
Figures are printed and written to `--out` immediately. A case that fails does not stop the others.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from cases import CASES, SMALL, Run, Sizes
from shapes import find_or_write
from sides import LlamaServer, Machine, Rekindle, Side

from rekindle.config import load_config

OURS, PEER, RAW = "rekindle", "llama-server", "raw"
RAW_TIMEOUT_S = 200
HERE = Path(__file__).parent


class CaseTimeout(Exception):
    """A case exceeded its time limit."""


class Results:
    """Figures by name and side. Each is written to disk immediately."""

    def __init__(self, folder: Path, model: str) -> None:
        self._path = folder / f"results-{model}.json"
        self.figures: dict[str, dict[str, float]] = {}
        self.notes: dict[str, list[str]] = {}
        if self._path.exists():
            before = json.loads(self._path.read_text())
            self.figures, self.notes = before["figures"], before["notes"]

    def add(self, side: str, figures: dict[str, float]) -> None:
        for name, value in figures.items():
            self.figures.setdefault(name, {})[side] = round(value, 3)
            print(self.line(name), flush=True)
        self.save()

    def note(self, side: str, case: str, notes: list[str]) -> None:
        self.notes[f"{case}, {side}"] = notes
        for note in notes:
            print(f"  ({side}, {case}: {note})", flush=True)
        self.save()

    def save(self) -> None:
        text = json.dumps({"figures": self.figures, "notes": self.notes}, indent=1)
        self._path.write_text(text)

    def line(self, name: str) -> str:
        found = self.figures[name]
        cells = "".join(
            f"{found[s]:14.2f}" if s in found else f"{'-':>14}" for s in (OURS, PEER, RAW)
        )
        ours = found.get(OURS)
        shares = [f"{ours / found[s]:.2f} of {s}" for s in (PEER, RAW) if ours and found.get(s)]
        if ours and name.endswith("sampled tokens/s"):
            greedy = self.figures.get(name.replace("sampled", "greedy"), {}).get(OURS)
            shares += [f"{ours / greedy:.2f} of greedy"] if greedy else []
        return f"{name:32}{cells}   {', '.join(shares)}"


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise CaseTimeout(f"more than {seconds} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def measure_raw(results: Results, model: Path, options: argparse.Namespace) -> None:
    command = [sys.executable, str(HERE / "raw_calls.py"), str(model), str(options.threads)]
    command.append("small" if options.model == "tiny" else "full")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            with at_most(RAW_TIMEOUT_S):
                assert process.stdout
                for line in process.stdout:
                    figures = json.loads(line)
                    if "failed" in figures:
                        results.note(RAW, "raw", [figures["failed"]])
                    else:
                        results.add(RAW, figures)
        finally:
            process.kill()


def measure(results: Results, side: Side, case: str, options: argparse.Namespace) -> None:
    sizes = SMALL if options.model == "tiny" else Sizes()
    run = Run(side, sizes, case, options.rounds)
    shutil.rmtree(side.machine.folder / "kv", ignore_errors=True)
    started = time.perf_counter()
    try:
        with at_most(int(CASES[case].timeout_s * options.patience)):
            for figures in CASES[case].measure(run):
                results.add(side.name, figures)
    except (Exception, CaseTimeout) as error:
        traceback.print_exc(limit=4, file=sys.stdout)
        run.notes.append(f"FAILED: {type(error).__name__}: {str(error)[:600]}")
    run.notes.append(f"took {time.perf_counter() - started:.0f} s")
    results.note(side.name, case, run.notes)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=("8b", "1b", "tiny"), default="8b")
    parser.add_argument(
        "--cases", default=",".join(CASES), help=f"comma-separated list of {', '.join(CASES)}"
    )
    parser.add_argument("--ours", action="store_true", help="measure Rekindle")
    parser.add_argument("--peer", action="store_true", help="measure llama-server")
    parser.add_argument("--raw", action="store_true", help="measure the raw calls")
    parser.add_argument("--out", type=Path, default=Path("bench-results/gpu"))
    parser.add_argument(
        "--scratch",
        type=Path,
        default=Path("build/gpu-scratch"),
        help="folder for logs and stored state",
    )
    parser.add_argument("--models", type=Path, default=Path("build/gpu-models"))
    parser.add_argument(
        "--vocabulary", type=Path, help="GGUF file with the vocabulary (default: SmolLM2)"
    )
    parser.add_argument("--llama-server", type=Path, default=os.environ.get("LLAMA_SERVER"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--patience", type=float, default=1.0, help="factor for all time limits")
    parser.add_argument("--ram-cache", default="50GiB")
    parser.add_argument("--disk-cache", default="20GB")
    parser.add_argument(
        "--always-on-disk", action="store_true", help="write state to disk in all cases"
    )
    parser.add_argument("--ours-flags", default="", help="additional flags of rekindle serve")
    parser.add_argument("--peer-flags", default="", help="additional flags of llama-server")
    options = parser.parse_args()
    if unknown := set(options.cases.split(",")) - set(CASES) - {""}:
        parser.error(f"unknown cases {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    return options


def sides(options: argparse.Namespace, model: Path) -> list[Side]:
    machine = Machine(
        model=model,
        folder=options.scratch,
        threads=options.threads,
        ram_cache=options.ram_cache,
        disk_cache=options.disk_cache,
        always_on_disk=options.always_on_disk,
        peer_binary=options.llama_server,
        ours_flags=shlex.split(options.ours_flags),
        peer_flags=shlex.split(options.peer_flags),
    )
    chosen: list[Side] = [Rekindle(OURS, machine)] if options.ours else []
    return [*chosen, LlamaServer(PEER, machine)] if options.peer else chosen


def vocabulary(options: argparse.Namespace) -> Path:
    found: Any = (
        options.vocabulary or load_config({}).models_dir / "SmolLM2-135M-Instruct.Q4_1.gguf"
    )
    if not found.exists():
        raise SystemExit(f"there is no {found}: `rekindle pull smollm2`, or give --vocabulary")
    return Path(found)


def main() -> None:
    options = parse()
    for folder in (options.out, options.scratch):
        folder.mkdir(parents=True, exist_ok=True)
    options.scratch = options.scratch.resolve()
    model = find_or_write(options.model, vocabulary(options), options.models.resolve())
    results = Results(options.out, options.model)
    print(f"{'':32}{OURS:>14}{PEER:>14}{RAW:>14}", flush=True)
    if options.raw:
        try:
            measure_raw(results, model, options)
        except (Exception, CaseTimeout) as error:
            results.note(RAW, "raw", [f"FAILED: {type(error).__name__}: {error}"])
    chosen = sides(options, model)
    for case in filter(None, options.cases.split(",")):
        for side in chosen:
            measure(results, side, case, options)
    print(f"\n{options.model}:{'':28}{OURS:>14}{PEER:>14}{RAW:>14}")
    for name in sorted(results.figures):
        print(results.line(name))


if __name__ == "__main__":
    main()
