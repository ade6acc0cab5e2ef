"""Measures what an idle conversation in the engine's pool costs, and what restoring it costs.

Prints for each length: the time to share it in place, the time to restore it from blocks in RAM,
and the duration of a decode step and of a prefill chunk of another turn, with and without the idle
state. It uses one thread and measures processor time, which a busy machine changes little.

    python benchmarks/idle_state.py [--model MODEL.gguf] [2048 8192 32768]
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from rekindle.engine.base import Blob, EngineOptions, Sequence, Work, run_step
from rekindle.engine.llamacpp.engine import LlamaCppEngine
from rekindle.protocol.requests import SamplingParams

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.support.tiny import write_llama

ROUNDS = 41
SLICE_TOKENS = 64
OTHER_TOKENS = 256  # of the other, running turn


@dataclass(frozen=True, slots=True)
class Costs:
    share_s: float
    restore_s: float
    decode_s: float  # a step of another turn, with and without the idle state
    decode_alone_s: float
    prefill_s: float  # the same for a prefill chunk
    prefill_alone_s: float

    @property
    def worth_rows(self) -> float:
        """The number of rows of other turns that cost as much as restoring."""
        return self.restore_s / max(self.decode_s - self.decode_alone_s, 1e-9)


def measure(model: Path, tokens: int) -> Costs:
    options = EngineOptions(path=model, parallel=2, context_tokens=tokens + 1024, threads=1)
    engine = LlamaCppEngine(options)
    try:
        return _measure(engine, tokens)
    finally:
        engine.close()


def _measure(engine: LlamaCppEngine, tokens: int) -> Costs:
    idle, other = engine.sequences.open(exact=False), engine.sequences.open(exact=False)
    _prefill(engine, idle, tokens)
    _prefill(engine, other, OTHER_TOKENS)
    share_s = _timed(lambda: _share(engine, idle))
    decode_s, prefill_s = _steps(engine, other)
    size = engine.capabilities.block_tokens
    blobs = [engine.sequences.export(idle, start, start + size) for start in range(0, tokens, size)]
    engine.sequences.close(idle)
    restore_s = _timed(lambda: _restore(engine, blobs))
    engine.sequences.close(other)
    other = engine.sequences.open(exact=False)
    _prefill(engine, other, OTHER_TOKENS)
    decode_alone_s, prefill_alone_s = _steps(engine, other)
    return Costs(share_s, restore_s, decode_s, decode_alone_s, prefill_s, prefill_alone_s)


def _prefill(engine: LlamaCppEngine, sequence: Sequence, tokens: int) -> None:
    for start in range(sequence.length, tokens, SLICE_TOKENS):
        run_step(engine, [Work(sequence, _tokens(start, SLICE_TOKENS), None)])


def _tokens(start: int, count: int) -> list[int]:
    return [3 + (7 * n) % 200 for n in range(start, start + count)]


def _share(engine: LlamaCppEngine, source: Sequence) -> None:
    into = engine.sequences.open(exact=False)
    engine.sequences.share(source, source.length, into)
    engine.sequences.close(into)


def _restore(engine: LlamaCppEngine, blobs: list[Blob]) -> None:
    into = engine.sequences.open(exact=False)
    for blob in blobs:
        engine.sequences.restore(into, blob, engine.capabilities.block_tokens)
    engine.sequences.close(into)


def _steps(engine: LlamaCppEngine, sequence: Sequence) -> tuple[float, float]:
    """Run one decode step and one prefill chunk, and undo each."""
    sampler = engine.sampler(SamplingParams(temperature=0), [])
    held = sequence.length

    def step(tokens: int) -> None:
        run_step(engine, [Work(sequence, _tokens(held, tokens), sampler)])
        engine.sequences.truncate(sequence, held)

    return _timed(lambda: step(1)), _timed(lambda: step(SLICE_TOKENS))


def _timed(act: Callable[[], None]) -> float:
    took_s = []
    for _ in range(ROUNDS):
        began_s = time.process_time()
        act()
        took_s.append(time.process_time() - began_s)
    return median(took_s)


def main(
    lengths: Annotated[list[int] | None, typer.Argument()] = None,
    model: Annotated[Path | None, typer.Option()] = None,
) -> None:
    lengths = lengths or [2048, 8192, 32768]
    print("tokens  share ms  restore ms  decode ms (alone)   slice of 64 ms (alone)  worth rows")
    with tempfile.TemporaryDirectory(prefix="rekindle-bench-") as folder:
        path = model or write_llama(Path(folder) / "tiny.gguf", context=max(lengths) + 1024)
        for tokens in lengths:
            found = measure(path, tokens)
            print(
                f"{tokens:6}  {1e3 * found.share_s:8.3f}  {1e3 * found.restore_s:10.2f}  "
                f"{1e3 * found.decode_s:9.3f} ({1e3 * found.decode_alone_s:.3f})  "
                f"{1e3 * found.prefill_s:18.2f} ({1e3 * found.prefill_alone_s:.2f})  "
                f"{found.worth_rows:10.0f}",
                flush=True,
            )


if __name__ == "__main__":
    typer.run(main)
