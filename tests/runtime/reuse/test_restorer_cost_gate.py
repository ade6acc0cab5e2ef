"""State is restored or computed, whichever is faster on this machine."""

from __future__ import annotations

import pytest

from rekindle.engine.base import Sequence
from rekindle.kvcache.plan import Plan
from rekindle.protocol.events import Reason
from rekindle.runtime.reuse.restorer import (
    MAX_SAMPLES,
    MIN_SAMPLES,
    MIN_TRANSFER_BYTES,
    RETRY_EVERY,
    CostGate,
)
from tests.support.fake import CELL_BYTES, FakeEngine
from tests.support.harness import RuntimeHarness

PROMPT = [1 + n % 900 for n in range(400)]
BLOCKS = 50


@pytest.fixture
def harness() -> RuntimeHarness:
    """A conversation whose state is only in RAM."""
    harness = RuntimeHarness(FakeEngine(), idle_tokens=0)
    harness.ask(PROMPT, max_tokens=1)
    harness.offload()
    return harness


def learn(gate: CostGate, *, token_s: float, byte_s: float, times: int = MAX_SAMPLES) -> None:
    """Report the same speed often enough to fill the gate's memory, at any depth."""
    for _ in range(times):
        for bits in range(10):
            gate.learn_computing(1 << bits, 100, 100 * token_s)
        gate.learn_restoring(MIN_TRANSFER_BYTES, MIN_TRANSFER_BYTES * byte_s)


def test_a_new_gate_restores_everything(harness: RuntimeHarness) -> None:
    learn(harness.kv.cost_gate, token_s=1e-6, byte_s=10.0, times=MIN_SAMPLES - 1)
    assert harness.ask([*PROMPT, 7], max_tokens=1).reused == len(PROMPT)


def test_state_that_is_faster_to_compute_is_computed_and_reported_as_such(
    harness: RuntimeHarness,
) -> None:
    cold = RuntimeHarness(FakeEngine()).ask([*PROMPT, 7], max_tokens=1)
    learn(harness.kv.cost_gate, token_s=1e-6, byte_s=1.0)
    reply = harness.ask([*PROMPT, 7], max_tokens=1)
    assert (reply.reused, reply.tokens) == (0, cold.tokens)
    assert reply.finished.cache.status == "miss"
    assert reply.finished.cache.reason is Reason.COMPUTED_CHEAPER


def test_state_that_is_faster_to_restore_is_restored(harness: RuntimeHarness) -> None:
    learn(harness.kv.cost_gate, token_s=1.0, byte_s=1e-3)
    reply = harness.ask([*PROMPT, 7], max_tokens=1)
    assert reply.reused == len(PROMPT)
    assert reply.finished.cache.reason is Reason.FULL_MATCH


def test_a_small_gain_does_not_justify_computing_again(harness: RuntimeHarness) -> None:
    byte_s = 0.15 / (len(PROMPT) * CELL_BYTES)
    learn(harness.kv.cost_gate, token_s=1e-9, byte_s=byte_s)
    assert harness.ask([*PROMPT, 7], max_tokens=1).reused == len(PROMPT)


def test_a_short_slowdown_does_not_change_the_decision(harness: RuntimeHarness) -> None:
    gate = harness.kv.cost_gate
    learn(gate, token_s=1e-3, byte_s=1e-9, times=1)
    learn(gate, token_s=1e-3, byte_s=10.0, times=MAX_SAMPLES - 1)
    assert harness.ask([*PROMPT, 7], max_tokens=1).reused == len(PROMPT)


def plan_of(harness: RuntimeHarness) -> Plan[Sequence]:
    turn = harness.submit([*PROMPT, 7]).turn
    return harness.runtime.admission.plan(turn, [])


def test_a_plan_is_cut_where_it_saves_the_most_time(harness: RuntimeHarness) -> None:
    """Computing slows down with depth, so early blocks are faster to compute than late ones. But
    late blocks can only be restored after the early ones."""
    gate, plan = harness.kv.cost_gate, plan_of(harness)
    assert len(plan.blocks) == BLOCKS
    learn(gate, token_s=10.0, byte_s=0.05)
    for _ in range(MAX_SAMPLES):
        gate.learn_computing(400, 100, 100 * 1e-6)
    cut = gate.apply(plan, may_cut=True)
    assert 0 < len(cut.blocks) < BLOCKS
    assert cut.reused_tokens == cut.blocks[-1].stop
    assert cut.is_cut
    assert cut.matched_tokens == plan.matched_tokens
    assert gate.apply(plan, may_cut=False).blocks == plan.blocks


def test_each_tier_has_its_own_measured_speed(harness: RuntimeHarness) -> None:
    gate, plan = harness.kv.cost_gate, plan_of(harness)
    learn(gate, token_s=1e-3, byte_s=1e-9)
    for _ in range(MIN_SAMPLES):
        gate.learn_reading("disk", MIN_TRANSFER_BYTES, MIN_TRANSFER_BYTES * 1.0)
    assert gate.apply(plan, may_cut=True).blocks == plan.blocks  # the blocks are in RAM


def test_short_transfers_are_not_measured(harness: RuntimeHarness) -> None:
    gate, plan = harness.kv.cost_gate, plan_of(harness)
    learn(gate, token_s=1e-6, byte_s=1e-9)
    for _ in range(MAX_SAMPLES):
        gate.learn_restoring(1000, 10.0)
        gate.learn_reading("ram", 1000, 10.0)
    assert gate.apply(plan, may_cut=True) is plan


def test_every_sixteenth_plan_is_restored_to_measure_again(
    harness: RuntimeHarness,
) -> None:
    gate, plan = harness.kv.cost_gate, plan_of(harness)
    learn(gate, token_s=1e-6, byte_s=1.0)
    cut = [gate.apply(plan, may_cut=True).is_cut for _ in range(3 * RETRY_EVERY)]
    assert cut.count(False) == 3
