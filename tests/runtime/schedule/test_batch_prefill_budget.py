"""Prompts beside replies on a GPU: replies have two thirds of the time, whatever a step takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean

import pytest

from rekindle.runtime.schedule.batch import PrefillBudget

ALONE_S, PROMISED = 8e-3, 1.5
RESTED = 64  # steps without a prompt, before the first

#: What a step of eight replies took beside a prompt of so many tokens in the same pool, in ms, by
#: the tokens of its slice (H200, 8B; 1,024 and what lies between the depths are drawn in).
MEASURED_MS = {
    0: {0: 8.0, 16: 9.1, 64: 9.6, 128: 12.5, 256: 19.2, 512: 28.5, 1024: 52.0},
    8192: {0: 8.7, 16: 8.7, 64: 11.7, 128: 15.7, 256: 24.7, 512: 39.5, 1024: 75.0},
    16384: {0: 9.3, 16: 9.5, 64: 14.0, 128: 19.6, 256: 32.0, 512: 52.0, 1024: 100.0},
    32768: {0: 10.2, 16: 11.1, 64: 19.3, 128: 25.7, 256: 53.2, 512: 72.4, 1024: 152.0},
}


def measured_s(depth: int, tokens: int) -> float:
    above = next(each for each in MEASURED_MS if each >= depth)
    below = max(each for each in MEASURED_MS if each <= depth)
    size = next(each for each in MEASURED_MS[0] if each >= tokens)
    share = (depth - below) / (above - below) if above > below else 0.0
    low, high = MEASURED_MS[below][size], MEASURED_MS[above][size]
    return (low + share * (high - low)) / 1000


@dataclass(slots=True)
class Machine:
    """Eight replies that never end, and prompts beside them. A step of another shape than the last
    one takes longer: with another number of rows, or more cells in steps of 256."""

    took_s: Callable[[int, int], float] = measured_s
    share: PrefillBudget = field(default_factory=PrefillBudget)
    replies: int = 8
    limit: int = (
        PrefillBudget.MAX_CHUNK_TOKENS
    )  # of a slice, by what is known of the machine's speed
    cells: int = 2000
    anew_s: float = 7e-3
    shape: tuple[int, int] = (0, 0)
    steps_s: list[float] = field(default_factory=list)
    slices: list[int] = field(default_factory=list)

    def step(self, depth: int = 0, pending: int = 0, prompts: int = 0) -> int:
        """One step; how many tokens of the prompt it had."""
        asked = (self.replies, prompts, pending, self.limit)
        tokens = self.share.next_chunk(*asked) if prompts else 0
        self.cells += self.replies + tokens
        before, self.shape = self.shape, (tokens, self.cells // 256)
        took_s = self.took_s(depth, tokens) + self.anew_s * (self.shape != before)
        self.steps_s.append(took_s)
        self.slices.append(tokens)
        self.share.learn(self.replies, tokens, prompts, took_s)
        return tokens

    def read(self, tokens: int, prompts: int = 1) -> float:
        """Read a prompt; how much longer replies took than alone meanwhile."""
        done, begun = 0, len(self.steps_s)
        while done < tokens:
            done += self.step(done, tokens - done, prompts)
        return self.slower(begun)

    def slower(self, begun: int) -> float:
        """How much longer steps took since so many than the first ones, which had no prompt."""
        return fmean(self.steps_s[begun:]) / fmean(self.steps_s[:RESTED])

    def rest(self, steps: int = RESTED) -> None:
        for _ in range(steps):
            self.step()


def test_a_long_prompt_slows_replies_down_by_half_at_most_on_average() -> None:
    machine = Machine()
    machine.rest()
    assert machine.read(32_768) <= PROMISED
    assert sum(machine.steps_s[RESTED:]) < 20  # seconds; alone it takes 2.5


def test_replies_do_not_wait_long_for_a_slice() -> None:
    machine = Machine()
    machine.rest()
    machine.read(32_768)
    assert max(machine.steps_s) <= 1.3 * PrefillBudget.MAX_CHUNK_S


def test_a_short_prompt_is_read_at_once() -> None:
    machine = Machine()
    machine.rest()
    before = len(machine.steps_s)
    machine.read(600)
    assert len(machine.steps_s) - before <= 6
    assert sum(machine.steps_s[before:]) < PrefillBudget.BURST_S


def test_short_prompts_that_follow_one_another_have_no_more_than_one_that_is_long() -> None:
    machine = Machine()
    machine.rest()
    before = len(machine.steps_s)
    for _ in range(60):
        machine.read(300)
        machine.rest(1)
    assert machine.slower(before) <= 1.1 * PrefillBudget.MAX_SLOWDOWN


def test_where_more_prompts_wait_than_replies_run_prompts_have_more_of_the_time() -> None:
    machine = Machine()
    machine.rest()
    assert (
        2
        < machine.read(16_384, prompts=32)
        <= 1.1 * (1 + 4 * (PrefillBudget.MAX_SLOWDOWN - 1)) + 0.2
    )


@pytest.mark.parametrize("row_s", [1e-6, 20e-6, 200e-6, 1.0])
def test_prompts_go_on_however_slow_they_are(row_s: float) -> None:
    machine = Machine(lambda _depth, tokens: ALONE_S + tokens * row_s)
    machine.rest()
    machine.read(2000)
    gaps = "".join("x" if each else "." for each in machine.slices[RESTED:]).split("x")
    assert max(map(len, gaps)) <= PrefillBudget.MAX_STEPS_BETWEEN_CHUNKS


def test_a_slow_moment_is_forgotten() -> None:
    slow = True
    machine = Machine(lambda depth, tokens: measured_s(depth, tokens) * (20 if slow else 1))
    machine.rest(5)
    machine.read(600)
    slow = False
    machine.rest()
    before = len(machine.steps_s)
    machine.read(600)
    assert len(machine.steps_s) - before <= 8


def test_what_one_reply_takes_alone_says_nothing_of_many() -> None:
    machine = Machine()
    machine.rest()
    machine.replies = 64
    taken = [machine.step(0, 1000, prompts=1) for _ in range(6)]
    assert taken[:2] == [0, 0]  # to see what that takes
    assert any(taken)


def test_no_slice_is_larger_than_a_batch() -> None:
    machine = Machine(limit=40)
    machine.rest()
    machine.read(2000)
    assert max(machine.slices) == 40


@pytest.mark.parametrize(("alone_s", "row_s", "step_s"), [(0.07, 1 / 120, 0.0), (0.4, 1e-3, 0.8)])
def test_a_slow_machine_gives_prompts_their_share_too(
    alone_s: float, row_s: float, step_s: float
) -> None:
    """An integrated GPU, and one that holds half of a model: a slice there takes long by itself."""
    machine = Machine(
        lambda _depth, tokens: alone_s + tokens * row_s + step_s * bool(tokens),
        limit=64 if row_s > 2e-3 else 512,
        anew_s=0.0,
    )
    machine.rest()
    assert 1.3 < machine.read(4096) <= 1.1 * PrefillBudget.MAX_SLOWDOWN


def test_steps_that_become_slower_meanwhile_do_not_starve_prompts() -> None:
    base_s = [0.008]
    machine = Machine(lambda _depth, tokens: base_s[0] + tokens * 5e-5)
    machine.rest()
    base_s[0] = 0.012
    before = len(machine.steps_s)
    machine.read(16_384)
    assert sum(machine.steps_s[before:]) < 16


def test_a_very_long_prompt_goes_on_though_its_cells_slow_everybody_down() -> None:
    machine = Machine(lambda depth, tokens: 8e-3 + depth * 7e-8 + tokens * (4e-5 + depth * 3e-9))
    machine.rest()
    machine.read(131_072)
    assert sum(machine.steps_s) < 230


def test_one_step_that_took_long_is_not_held_against_prompts_for_long() -> None:
    machine = Machine()
    machine.rest()
    machine.share.learn(8, 0, 1, 5.0)
    before = len(machine.steps_s)
    machine.read(8192)
    assert sum(machine.steps_s[before:]) < 4


def test_what_steps_of_many_replies_take_is_not_learnt_from_one_that_is_made_anew() -> None:
    machine = Machine(anew_s=30e-3)
    machine.step(0, 1000, prompts=1)
    for _ in range(6):
        machine.read(8192)
    late = machine.steps_s[-200:]
    assert fmean(late) < 2 * ALONE_S
