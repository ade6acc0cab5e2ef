"""Steps use the number of threads that is fastest, also while other programs use cores."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from rekindle.engine.base import EngineOptions
from rekindle.engine.llamacpp.engine import LlamaCppEngine
from rekindle.engine.llamacpp.step_threads import (
    PAUSE_S,
    RECOUNT_INTERVAL_S,
    OtherPrograms,
    StepThreads,
    ThreadChoice,
)
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


def test_a_reply_that_a_program_disturbs_from_the_start_changes_to_fewer_threads_at_once() -> None:
    choice = ThreadChoice(2)
    for _ in range(10):
        crowded = choice.next == 2
        choice.learn(1.0 if crowded else 0.01, is_crowded=crowded)
    assert choice.threads == 1


def test_fewer_threads_stay_while_no_other_core_is_idle() -> None:
    """A trial of all threads would stall the reply for a second."""
    choice = ThreadChoice(2, lambda: 1)
    choice.restart(1)
    most, _ = run(choice, 5000, lambda threads: 1.0 if threads == 2 else 0.01)
    assert most == 0


def test_all_threads_are_tried_when_a_core_becomes_idle() -> None:
    idle = 1
    choice = ThreadChoice(2, lambda: idle)
    choice.restart(idle)
    run(choice, 300, lambda threads: 0.01)
    idle = 2
    run(choice, 300, lambda threads: 0.01 if threads == 2 else 0.02)
    assert choice.threads == 2


def test_a_choice_leaves_as_many_cores_as_other_programs_use() -> None:
    choice = ThreadChoice(16, lambda: 12)
    choice.learn(1.0, is_crowded=True)
    assert choice.next == 12


class Machine:
    """Two cores and a clock. Steps with more threads than idle cores take 30 times as long."""

    def __init__(self, *, knows_idle_cores: bool) -> None:
        self.now_s = self.cpu_s = 0.0
        self.busy = 0
        self.threads = 2
        self.knows = knows_idle_cores

    def idle_cores(self) -> int | None:
        return 2 - self.busy if self.knows else None

    def step_threads(self) -> StepThreads:
        def use(threads: int) -> None:
            self.threads = threads

        return StepThreads(2, use, self.idle_cores, lambda: self.now_s, lambda: self.cpu_s)

    def step(self, threads: StepThreads, rows: int, *, is_prefill: bool = False) -> float:
        threads.begin(rows, is_prefill=is_prefill)
        took_s = 5e-3 * rows / self.threads
        share = 1.0
        if self.threads > 2 - self.busy:
            took_s, share = 30 * took_s, 0.6
        self.now_s += took_s
        self.cpu_s += took_s * self.threads * share
        threads.end()
        return took_s


def test_the_first_prefill_after_a_pause_leaves_a_busy_core_free() -> None:
    machine = Machine(knows_idle_cores=True)
    threads = machine.step_threads()
    machine.step(threads, 40, is_prefill=True)
    assert machine.threads == 2
    machine.busy = 1
    machine.now_s += 2 * PAUSE_S
    machine.step(threads, 40, is_prefill=True)
    assert machine.threads == 1


@pytest.mark.parametrize("knows", [True, False])
def test_a_long_prompt_loses_one_chunk_to_a_program_that_starts_meanwhile(knows: bool) -> None:
    machine = Machine(knows_idle_cores=knows)
    threads = machine.step_threads()
    for _ in range(20):
        machine.step(threads, 256, is_prefill=True)
    machine.busy = 1
    slow = sum(machine.step(threads, 256, is_prefill=True) > 2 for _ in range(6))
    assert slow == 1


def test_a_reply_leaves_the_core_free_that_its_prefill_found_busy() -> None:
    machine = Machine(knows_idle_cores=True)
    threads = machine.step_threads()
    for _ in range(20):
        machine.step(threads, 1)
    machine.step(threads, 256, is_prefill=True)
    machine.busy = 1
    machine.step(threads, 256, is_prefill=True)
    machine.step(threads, 1)
    assert machine.threads == 1


def test_prefill_has_all_threads_again_after_the_other_program_ends() -> None:
    machine = Machine(knows_idle_cores=True)
    machine.busy = 1
    threads = machine.step_threads()
    machine.step(threads, 256, is_prefill=True)
    machine.busy = 0
    started_s = machine.now_s
    while machine.threads < 2:
        machine.step(threads, 256, is_prefill=True)
    assert machine.now_s < started_s + 2 * RECOUNT_INTERVAL_S


def test_an_undisturbed_prefill_never_tries_fewer_threads() -> None:
    machine = Machine(knows_idle_cores=False)
    threads = machine.step_threads()
    for _ in range(500):
        machine.step(threads, 256, is_prefill=True)
        assert machine.threads == 2


def test_each_batch_size_learns_separately() -> None:
    """A lone reply is slow with two threads, eight replies are not."""
    machine = Machine(knows_idle_cores=False)
    threads = machine.step_threads()
    for _ in range(500):
        for rows in (1, 8):
            threads.begin(rows, is_prefill=False)
            machine.now_s += 1e-3 if (machine.threads == 1) == (rows == 1) else 2e-3
            machine.cpu_s += 1.0
            threads.end()
    threads.begin(1, is_prefill=False)
    assert machine.threads == 1
    threads.end()
    threads.begin(8, is_prefill=False)
    assert machine.threads == 2


def proc_folder(folder: Path, *, running: int, own: str) -> Path:
    """Write the files of Linux that are read. `own` has a state for each of our threads."""
    folder.joinpath("loadavg").write_text(f"0.50 0.40 0.30 {running}/120 4711\n")
    for number, state in enumerate(own):
        thread = folder / "self" / "task" / str(number)
        thread.mkdir(parents=True)
        thread.joinpath("stat").write_text(f"{number} (a name) of) {state} 1 2 3")
    return folder


@pytest.mark.parametrize(
    ("running", "own", "idle"),
    [(1, "R", 4), (3, "RS", 2), (3, "RRR", 4), (2, "RRR", 4), (9, "RD", 0), (20, "R", 0)],
)
def test_idle_cores_are_those_that_no_other_program_uses(
    tmp_path: Path, running: int, own: str, idle: int
) -> None:
    folder = proc_folder(tmp_path, running=running, own=own)
    found = OtherPrograms(folder, cores=4).idle_cores()
    assert found is not None
    assert max(found, 0) == idle


def test_a_system_without_proc_does_not_know_its_idle_cores(tmp_path: Path) -> None:
    assert OtherPrograms(tmp_path / "absent").idle_cores() is None


def test_a_busy_program_uses_a_core_of_this_machine() -> None:
    programs = OtherPrograms(cores=64)
    if programs.idle_cores() is None:
        pytest.skip("this system does not count running threads")
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        while (programs.idle_cores() or 64) > 63:  # ends when the program runs
            assert busy.poll() is None
    finally:
        busy.kill()
        busy.wait()


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
