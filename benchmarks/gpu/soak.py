"""Checks that a build computes steps of all sizes without errors for a long time.

    python benchmarks/gpu/soak.py MODEL.gguf --seconds 60 [--raw]

`--raw` makes only llama.cpp's calls. Without it, a runtime in this process starts and ends streams,
is idle in between, and parks and offloads their state. It prints what it computed. A failing device
ends the process with llama.cpp's message.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from random import Random

from raw_calls import Caller

from rekindle.engine.base import EngineOptions
from rekindle.engine.llamacpp.batch import BatchRows
from rekindle.engine.llamacpp.engine import LlamaCppEngine
from rekindle.protocol.events import Finished

sys.path.append(str(Path(__file__).parents[2]))  # the path of a script does not include the tests

from tests.support.harness import RuntimeHarness

STREAMS = 64
CELLS = 8192
MAX_ROWS = 128
SAME_STEPS = 24  # any build creates a CUDA graph after fewer steps
REPORT_S = 10.0


def soak_calls(path: Path, seconds: float, _chance: Random) -> None:
    """Steps with one row, two rows and so on, each often enough to become a CUDA graph."""
    caller = Caller(path, 8)
    steps, until_s = 0, time.monotonic() + seconds
    with caller.context(CELLS, MAX_ROWS) as context:
        while time.monotonic() < until_s:
            for count in range(1, MAX_ROWS + 1):
                rows = [BatchRows(slot, 0, [1000 + slot], True) for slot in range(count)]
                for _ in range(SAME_STEPS):
                    context.argmax(context.call(rows)[:1])
                    for slot in range(count):
                        context.forget(slot)
                steps += SAME_STEPS
    print(f"{steps} calls", flush=True)


def soak_runtime(path: Path, seconds: float, chance: Random) -> None:
    options = EngineOptions(
        path=path, parallel=STREAMS, context_tokens=2048, kv_fraction=0.08, park_fraction=0.1,
        host_bytes=4 << 30, threads=8,
    )  # fmt: skip
    harness = RuntimeHarness(LlamaCppEngine(options), parallel=STREAMS, ram_bytes=4 << 30)
    turns, told_s = 0, time.monotonic()
    until_s = told_s + seconds
    while time.monotonic() < until_s:
        for _ in range(chance.choice((1, 8, 32, STREAMS))):
            prompt = [chance.randrange(1000, 40_000) for _ in range(chance.randint(60, 300))]
            harness.submit(prompt, max_tokens=chance.randint(20, 256), ignore_eos=True)
            turns += 1
        while harness.scheduler.turns:
            harness.scheduler.step()
        failed = sum(not isinstance(each.events[-1], Finished) for each in harness.replies.values())
        if failed:
            sys.exit(f"{failed} of {turns} turns failed")
        for _ in range(chance.randint(0, 40)):  # idle
            harness.scheduler.step()
        if time.monotonic() - told_s > REPORT_S:
            told_s = time.monotonic()
            print(f"{turns} turns", flush=True)
    print(f"{turns} turns", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--raw", action="store_true", help="make only llama.cpp's calls")
    given = parser.parse_args()
    soak = soak_calls if given.raw else soak_runtime
    soak(given.model, given.seconds, Random(given.seed))


if __name__ == "__main__":
    main()
