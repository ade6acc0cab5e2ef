"""Measures where the time of a decode step goes, with a runtime in this process and without HTTP.

python -m benchmarks.gpu.step_times MODEL.gguf --streams 32 --temperature 0.8
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rekindle.engine.base import EngineOptions
from rekindle.engine.llamacpp.context import Context
from rekindle.engine.llamacpp.engine import LlamaCppEngine
from rekindle.engine.sampling.sampler import StepSampler
from rekindle.protocol.requests import SamplingParams
from rekindle.runtime.schedule.outbox import Outbox
from rekindle.runtime.schedule.scheduler import Scheduler
from tests.support.harness import RuntimeHarness

STEPS = 150
PROMPT_TOKENS = 100
PARTS = (
    (Scheduler, "_collect"),
    (Outbox, "collect_decoded"),
    (Outbox, "take"),  # while the device computes
    (LlamaCppEngine, "launch"),
    (LlamaCppEngine, "launch_next"),
    (LlamaCppEngine, "collect"),
    (Context, "decode"),  # until the device has started
    (Context, "decode_next"),
    (Context, "logits"),  # until the device has finished
    (StepSampler, "sample"),
)


class Times:
    """Total seconds and number of calls per function."""

    def __init__(self) -> None:
        self.spent_s: defaultdict[str, float] = defaultdict(float)

    def measure(self, owner: Any, name: str) -> None:
        whole: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **named: Any) -> Any:
            started = time.perf_counter()
            try:
                return whole(*args, **named)
            finally:
                self.spent_s[name] += time.perf_counter() - started

        setattr(owner, name, timed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--temperature", type=float, default=0.0)
    given = parser.parse_args()
    times = Times()
    for owner, name in PARTS:
        times.measure(owner, name)
    options = EngineOptions(path=given.model, parallel=given.streams, context_tokens=2048)
    engine = LlamaCppEngine(options)
    harness = RuntimeHarness(engine, parallel=given.streams, is_undisturbed=lambda: True)
    for number in range(given.streams):
        sampling = SamplingParams(temperature=given.temperature, top_p=0.9, seed=number)
        prompt = [1000 + number] * PROMPT_TOKENS
        harness.submit(prompt, max_tokens=2 * STEPS, sampling=sampling, ignore_eos=True)
    while any(not reply.tokens for reply in harness.replies.values()):
        harness.scheduler.step()
    for _ in range(10):
        harness.scheduler.step()
    times.spent_s.clear()
    started, first = time.perf_counter(), next(iter(harness.replies.values())).turn
    before = first.generated_tokens
    while first.generated_tokens < before + STEPS:
        harness.scheduler.step()
    steps = first.generated_tokens - before
    whole_ms = (time.perf_counter() - started) * 1000 / steps
    print(f"{given.streams} streams, temperature {given.temperature}: {whole_ms:.2f} ms a step")
    for name, spent_s in times.spent_s.items():
        print(f"  {name:12} {spent_s * 1000 / steps:6.2f} ms")


if __name__ == "__main__":
    main()
