"""Decode steps use the number of threads that is fastest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from rekindle.engine.base import EngineOptions
from rekindle.engine.llamacpp.context import StepThreads, ThreadChoice
from rekindle.engine.llamacpp.engine import LlamaCppEngine
from tests.contract.actions import PROMPT, decode, prefill
from tests.support.tiny import write_llama

LONG = [*PROMPT, *PROMPT, *PROMPT, *PROMPT]  # attention to 512 cells and more is divided
Duration = Callable[[int], float]  # of a step, by its threads


def run(choice: ThreadChoice, steps: int, duration: Duration) -> tuple[int, float]:
    """Return how many steps had all threads, and the total time."""
    most, spent_s = 0, 0.0
    for _ in range(steps):
        threads = choice.next
        took_s = duration(threads)
        choice.learn(took_s)
        most += threads == 2
        spent_s += took_s
    return most, spent_s


def alone(threads: int) -> float:
    return 0.3e-3 if threads == 2 else 0.45e-3


def shared(chance: Random) -> Duration:
    """Another program takes the core of one of two threads in every third step."""
    return lambda threads: 4e-3 if threads == 2 and chance.random() < 1 / 3 else alone(threads)


def test_all_threads_compute_if_they_are_faster() -> None:
    choice = ThreadChoice(2)
    most, spent_s = run(choice, 5000, alone)
    assert choice.threads == 2
    assert most > 0.95 * 5000
    assert spent_s < 1.03 * 5000 * alone(2)


def test_one_thread_fewer_computes_while_another_program_wants_a_core() -> None:
    choice = ThreadChoice(2)
    most, spent_s = run(choice, 5000, shared(Random(1)))
    assert choice.threads == 1
    assert most < 0.05 * 5000
    assert spent_s < 1.2 * 5000 * alone(1)


def test_all_threads_compute_again_after_the_other_program_ends() -> None:
    choice = ThreadChoice(2)
    run(choice, 1000, shared(Random(2)))
    most, _ = run(choice, 5000, alone)
    assert choice.threads == 2
    assert most > 0.8 * 5000


def test_a_program_that_starts_later_is_noticed_immediately() -> None:
    """Although trials of slow steps are rare."""
    choice = ThreadChoice(2)
    run(choice, 1000, lambda threads: 0.4 if threads == 2 else 0.8)
    most, _ = run(choice, 100, lambda threads: 4.0 if threads == 2 else 0.8)
    assert choice.threads == 1
    assert most < 50


def test_a_hopeless_trial_ends_after_one_step() -> None:
    choice = ThreadChoice(2)
    run(choice, 500, lambda threads: 100e-3 if threads == 2 else 1e-3)
    most, _ = run(choice, 10_000, lambda threads: 100e-3 if threads == 2 else 1e-3)
    assert most <= 3


@pytest.mark.parametrize("most", [1, 2, 16])
def test_at_least_one_thread_computes(most: int) -> None:
    choice = ThreadChoice(most)
    chance = Random(3)
    for _ in range(2000):
        assert most - 1 <= choice.next <= most
        assert choice.next >= 1
        choice.learn(chance.random())


def test_prefill_uses_all_threads_and_each_batch_size_learns_separately() -> None:
    counts: list[int] = []
    threads = StepThreads(2, counts.append)
    for _ in range(500):  # a lone reply is slow with two, eight replies are not
        for replies in (1, 8):
            threads.begin(replies)
            is_fewer = bool(counts) and counts[-1] == 1
            threads.end(1e-3 if is_fewer == (replies == 1) else 2e-3)
    threads.begin(1)
    assert counts[-1] == 1
    threads.end(1e-3)
    threads.begin(0)
    assert counts[-1] == 2
    threads.end(100.0)  # teaches nothing
    threads.begin(1)
    assert counts[-1] == 1


def test_an_exact_reply_has_the_same_bits_the_second_time(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "model.gguf")
    engine = LlamaCppEngine(EngineOptions(path=path, parallel=2, threads=2))
    rows: list[np.ndarray[Any, Any]] = []
    engine.observe = lambda _sequence, row: rows.append(row.copy())
    replies = []
    try:
        for _ in range(3):
            rows.clear()
            sequence = engine.sequences.open(exact=True)
            decode(engine, sequence, prefill(engine, sequence, LONG), 40)
            replies.append(np.stack(rows))
            engine.sequences.close(sequence)
    finally:
        engine.close()
    assert np.array_equal(replies[0], replies[1])
    assert np.array_equal(replies[0], replies[2])
