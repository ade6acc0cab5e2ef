"""Restoring or computing: whatever this machine has shown to be faster."""

from __future__ import annotations

import pytest

from rekindle.engine.base import Sequence
from rekindle.kvcache.plan import Plan
from rekindle.protocol.events import Reason
from rekindle.runtime.reuse.restorer import (
    LAST_TIMES,
    LEAST_BYTES,
    LEAST_TIMES,
    TRIED_AGAIN,
    CostGate,
)
from tests.support.fake import CELL_BYTES, FakeEngine
from tests.support.harness import RuntimeHarness

PROMPT = [1 + n % 900 for n in range(400)]
BLOCKS = 50


@pytest.fixture
def harness() -> RuntimeHarness:
    """A conversation whose state is in RAM alone."""
    harness = RuntimeHarness(FakeEngine(), idle_tokens=0)
    harness.ask(PROMPT, max_tokens=1)
    harness.offload()
    return harness


def learn(gate: CostGate, *, token_s: float, byte_s: float, times: int = LAST_TIMES) -> None:
    """So many times, all that are remembered; at any depth."""
    for _ in range(times):
        for bits in range(10):
            gate.learn_computing(1 << bits, 100, 100 * token_s)
        gate.learn_restoring(LEAST_BYTES, LEAST_BYTES * byte_s)


def test_nothing_is_known_of_a_machine_at_first(harness: RuntimeHarness) -> None:
    learn(harness.kv.cost_gate, token_s=1e-6, byte_s=10.0, times=LEAST_TIMES - 1)
    assert harness.ask([*PROMPT, 7], max_tokens=1).reused == len(PROMPT)


def test_what_is_sooner_computed_is_computed_and_the_report_says_so(
    harness: RuntimeHarness,
) -> None:
    cold = RuntimeHarness(FakeEngine()).ask([*PROMPT, 7], max_tokens=1)
    learn(harness.kv.cost_gate, token_s=1e-6, byte_s=1.0)
    reply = harness.ask([*PROMPT, 7], max_tokens=1)
    assert (reply.reused, reply.tokens) == (0, cold.tokens)
    assert reply.finished.cache.status == "miss"
    assert reply.finished.cache.reason is Reason.COMPUTED_CHEAPER


def test_what_is_sooner_restored_is_restored(harness: RuntimeHarness) -> None:
    learn(harness.kv.cost_gate, token_s=1.0, byte_s=1e-3)
    reply = harness.ask([*PROMPT, 7], max_tokens=1)
    assert reply.reused == len(PROMPT)
    assert reply.finished.cache.reason is Reason.FULL_MATCH


def test_for_a_small_gain_nothing_is_computed_again(harness: RuntimeHarness) -> None:
    byte_s = 0.15 / (len(PROMPT) * CELL_BYTES)
    learn(harness.kv.cost_gate, token_s=1e-9, byte_s=byte_s)
    assert harness.ask([*PROMPT, 7], max_tokens=1).reused == len(PROMPT)


def test_a_moment_of_load_decides_nothing(harness: RuntimeHarness) -> None:
    gate = harness.kv.cost_gate
    learn(gate, token_s=1e-3, byte_s=1e-9, times=1)
    learn(gate, token_s=1e-3, byte_s=10.0, times=LAST_TIMES - 1)
    assert harness.ask([*PROMPT, 7], max_tokens=1).reused == len(PROMPT)


def plan_of(harness: RuntimeHarness) -> Plan[Sequence]:
    turn = harness.submit([*PROMPT, 7]).turn
    return harness.runtime.admission.plan(turn, [])


def test_a_plan_is_cut_where_it_saves_most(harness: RuntimeHarness) -> None:
    """Computing slows down with depth: what comes first is sooner computed, the rest restored, but
    then all of it is restored, for state has a beginning."""
    gate, plan = harness.kv.cost_gate, plan_of(harness)
    assert len(plan.blocks) == BLOCKS
    learn(gate, token_s=10.0, byte_s=0.05)
    for _ in range(LAST_TIMES):
        gate.learn_computing(400, 100, 100 * 1e-6)
    cut = gate.apply(plan, may_cut=True)
    assert 0 < len(cut.blocks) < BLOCKS
    assert cut.reused_tokens == cut.blocks[-1].stop
    assert cut.is_cut
    assert cut.matched_tokens == plan.matched_tokens
    assert gate.apply(plan, may_cut=False).blocks == plan.blocks


def test_a_slow_tier_is_judged_by_its_own_speed(harness: RuntimeHarness) -> None:
    gate, plan = harness.kv.cost_gate, plan_of(harness)
    learn(gate, token_s=1e-3, byte_s=1e-9)
    for _ in range(LEAST_TIMES):
        gate.learn_reading("disk", LEAST_BYTES, LEAST_BYTES * 1.0)
    assert gate.apply(plan, may_cut=True).blocks == plan.blocks  # they are in RAM


def test_short_transfers_teach_nothing(harness: RuntimeHarness) -> None:
    gate, plan = harness.kv.cost_gate, plan_of(harness)
    learn(gate, token_s=1e-6, byte_s=1e-9)
    for _ in range(LAST_TIMES):
        gate.learn_restoring(1000, 10.0)
        gate.learn_reading("ram", 1000, 10.0)
    assert gate.apply(plan, may_cut=True) is plan


def test_now_and_then_a_plan_is_carried_out_to_see_whether_it_pays_by_now(
    harness: RuntimeHarness,
) -> None:
    gate, plan = harness.kv.cost_gate, plan_of(harness)
    learn(gate, token_s=1e-6, byte_s=1.0)
    cut = [gate.apply(plan, may_cut=True).is_cut for _ in range(3 * TRIED_AGAIN)]
    assert cut.count(False) == 3
