"""Tenants share the engine's time: the many turns of one do not delay the few of another."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import pytest

from rekindle.engine.base import Sampled
from rekindle.runtime.schedule.batch import ALONE_S, MAX_LEAD_S
from rekindle.runtime.schedule.scheduler import MAX_WAIT_S
from tests.runtime.device.test_images_picture_encoder import seeing
from tests.support.fake import CELL_BYTES, FakeEngine
from tests.support.harness import Reply, RuntimeHarness
from tests.support.pictures import drawn

A, B, C, D = b"a", b"b", b"c", b"d"
BLOCK_BYTES = 8 * CELL_BYTES


class PacedEngine(FakeEngine):
    """Computes at the speed of a small model on two cores, by a clock of its own."""

    STEP_S, ROW_S = 0.015, 0.0025

    now_s = 0.0

    def collect(self, pending: Any) -> list[Sampled | None]:
        rows = sum(len(item.tokens) for item in pending.work)
        self.now_s += self.STEP_S + rows * self.ROW_S
        return super().collect(pending)


def paced(engine: PacedEngine | None = None, **settings: Any) -> RuntimeHarness:
    engine = engine or PacedEngine(context_tokens=4096, pool_tokens=65536, max_sequences=40)
    return RuntimeHarness(engine, step_clock=lambda: engine.now_s, **settings)


def now_s(harness: RuntimeHarness) -> float:
    assert isinstance(harness.engine, PacedEngine)
    return harness.engine.now_s


class Stopwatch:
    """Measures the engine time of each tenant from outside, step by step."""

    def __init__(self, harness: RuntimeHarness) -> None:
        self._harness = harness
        self.used_s: defaultdict[bytes, float] = defaultdict(float)

    def step(self) -> None:
        turns = [reply.turn for reply in self._harness.replies.values() if not reply.ended]
        before, before_s = [turn.held_tokens for turn in turns], now_s(self._harness)
        self._harness.scheduler.step()
        rows = Counter[bytes]()
        for turn, held in zip(turns, before, strict=True):
            rows[turn.tenant] += max(turn.held_tokens - held, 0)
        for tenant, count in rows.items():
            share = count / max(rows.total(), 1)
            self.used_s[tenant] += (now_s(self._harness) - before_s) * share


def busy(salt: bytes = D) -> RuntimeHarness:
    """A harness whose only place is taken by one tenant."""
    harness = paced(PacedEngine(), parallel=1)
    harness.submit([1], salt=salt, max_tokens=3)
    harness.scheduler.step()
    return harness


def order_of_starts(harness: RuntimeHarness, replies: dict[str, Reply]) -> list[str]:
    started: dict[str, None] = {}  # ordered
    while len(started) < len(replies):
        harness.scheduler.step()
        started |= dict.fromkeys(name for name, reply in replies.items() if reply.started)
    return list(started)


def starts(harness: RuntimeHarness, *turns: tuple[str, int]) -> list[str]:
    """Names of turns in the order in which they start. The first letter is the tenant."""
    replies = {
        name: harness.submit([10 + n], salt=name[:1].encode(), priority=priority, max_tokens=1)
        for n, (name, priority) in enumerate(turns)
    }
    return order_of_starts(harness, replies)


def test_one_tenants_turn_starts_before_forty_urgent_ones_of_another() -> None:
    urgent = [(f"a{number}", 10) for number in range(40)]
    assert starts(busy(A), *urgent, ("b", 0))[0] == "b"


def test_tenants_start_turns_alternately() -> None:
    turns = ["a1", "a2", "a3", "b1", "b2", "c1"]
    assert starts(busy(), *((name, 0) for name in turns)) == ["a1", "b1", "c1", "a2", "b2", "a3"]


def test_a_tenant_that_asks_again_and_again_does_not_overtake_a_third_one() -> None:
    harness = busy()
    a, c = harness.submit([5], salt=A, max_tokens=1), harness.submit([6], salt=C, max_tokens=1)
    asked = 0
    while not (a.ended and c.ended):
        asked += 1
        harness.run(harness.submit([10 + asked], salt=B, max_tokens=1))
    assert asked <= 2


def test_priority_orders_the_turns_of_one_tenant_only() -> None:
    turns = [("a1", 0), ("b1", -10), ("a2", 10), ("b2", 0)]
    assert starts(busy(), *turns) == ["a2", "b2", "a1", "b1"]


def test_priority_overtakes_own_turns_however_many_others_come_in_between() -> None:
    others = [(f"b{number}", 0) for number in range(20)]
    started = starts(busy(), ("a1", 0), *others, ("a2", 1))
    assert started.index("a2") < started.index("a1")


def test_a_short_prompt_is_read_between_the_long_prompts_of_another_tenant() -> None:
    engine = FakeEngine(context_tokens=4096, pool_tokens=16384)
    harness = RuntimeHarness(engine, parallel=8)
    long = [
        harness.submit(list(range(at, at + 3800)), salt=A, priority=10, max_tokens=1)
        for at in (100, 200, 300)
    ]
    while not all(reply.turn.held_tokens for reply in long[:2]):
        harness.scheduler.step()
    short = harness.submit([1, 2, 3], salt=B, max_tokens=1)
    for _ in range(2):
        harness.scheduler.step()
    assert short.ended
    harness.run()


def test_two_tenants_get_equal_prefill_whatever_the_number_of_their_prompts() -> None:
    engine = PacedEngine(context_tokens=4096, pool_tokens=32768)
    harness = paced(engine, parallel=8)
    many = [harness.submit(list(range(at, at + 3000)), salt=A) for at in range(100, 500, 100)]
    one = harness.submit(list(range(50, 3050)), salt=B)
    while not one.text:
        harness.scheduler.step()
        of_a = sum(reply.turn.held_tokens for reply in many)
        assert abs(of_a - one.turn.held_tokens) <= 2 * engine.batch_tokens
    harness.run()


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_short_prompts_without_end_do_not_stop_the_long_prompt_of_another_tenant(
    device: Any,
) -> None:
    engine = FakeEngine(device=device, context_tokens=4096, pool_tokens=16384)
    harness = RuntimeHarness(engine, parallel=8)
    harness.submit([1], salt=C, max_tokens=4000)  # a GPU saves short prompts the wait for replies
    long = harness.submit(list(range(100, 1100)), salt=B, max_tokens=1)
    for number in range(2000):
        harness.submit([number, 7, 8], salt=A, max_tokens=1)
        harness.scheduler.step()
        if long.ended:
            break
    assert long.ended


def test_many_restored_conversations_of_one_tenant_do_not_delay_anothers() -> None:
    engine = FakeEngine(context_tokens=2048, pool_tokens=16384)
    harness = RuntimeHarness(engine, idle_tokens=0, parallel=8)
    long, short = [[at] * 800 for at in (1, 2, 3)], [4] * 80
    for prompt in long:
        harness.ask(prompt, salt=A, max_tokens=1)
    harness.ask(short, salt=B, max_tokens=1)
    harness.kv.budget.step_bytes = BLOCK_BYTES
    harness.submit([9], salt=C, max_tokens=1000)  # so that a step restores one block
    harness.scheduler.step()
    resumed = [harness.submit([*prompt, 5], salt=A, priority=10, max_tokens=1) for prompt in long]
    harness.scheduler.step()
    other = harness.submit([*short, 5], salt=B, max_tokens=1)
    while not other.ended:
        harness.scheduler.step()
    assert other.reused == len(short)
    assert not any(reply.ended for reply in resumed)
    assert sum(reply.turn.held_tokens for reply in resumed) <= 3 * len(short)
    harness.run(*resumed)


def test_the_tenant_that_holds_most_of_a_full_pool_is_preempted() -> None:
    harness = RuntimeHarness(FakeEngine(pool_tokens=256, context_tokens=256), parallel=4)
    many = [harness.submit([at, at], salt=A, priority=10, max_tokens=200) for at in (100, 101, 102)]
    one = harness.submit([103, 103], salt=B, priority=-10, max_tokens=100)
    said = 0
    while not one.ended:
        harness.scheduler.step()
        assert one.turn.sequence is not None or one.ended or not said
        said = len(one.tokens)
    assert harness.kv.counts.preemptions > 0
    harness.run(*many)
    assert all(len(reply.tokens) == 200 for reply in many)


def test_a_preempted_turn_lets_another_tenant_start_first() -> None:
    harness = RuntimeHarness(FakeEngine(pool_tokens=256, context_tokens=256), parallel=2)
    first, second = (harness.submit([at, at], salt=A, max_tokens=200) for at in (100, 101))
    while not harness.kv.counts.preemptions:
        harness.scheduler.step()
    other = harness.submit([102], salt=B, max_tokens=1)
    harness.run(other)
    assert not first.ended
    harness.run(first, second)


def test_a_broken_engine_continues_the_turns_of_all_tenants() -> None:
    harness = RuntimeHarness(FakeEngine(break_steps={3}), parallel=3)
    replies = [
        harness.submit([at] * 40, salt=salt, max_tokens=20)
        for at, salt in ((100, A), (101, A), (102, B), (103, C))
    ]
    harness.run()
    assert [len(reply.tokens) for reply in replies] == [20] * 4
    assert harness.scheduler.turns == 0


def test_the_pictures_of_tenants_are_encoded_in_turn() -> None:
    harness = RuntimeHarness(seeing(context_tokens=4096, pool_tokens=16384), parallel=8)
    images = [drawn(seed) for seed in range(12)]
    many = [
        harness.submit_chat(
            [{"role": "user", "content": [{"type": "image"} for _ in range(5)]}],
            images[at : at + 5],
            salt=A,
            max_tokens=1,
        )
        for at in (0, 5)
    ]
    one = harness.submit_chat(
        [{"role": "user", "content": [{"type": "image"}, {"type": "image"}]}],
        images[10:],
        salt=B,
        max_tokens=1,
    )
    harness.run(one)
    assert not any(reply.ended for reply in many)
    harness.run(*many)


def keep_asking(harness: RuntimeHarness, turns: dict[bytes, list[Reply]], **load: Any) -> None:
    """Let each tenant have as many turns as its list has places, by replacing those that ended."""
    for salt, replies in turns.items():
        for place, reply in enumerate(replies):
            if reply.ended:
                prompt = [salt[0], place, *([len(harness.replies)] * load["prompt_tokens"])]
                replies[place] = harness.submit(prompt, salt=salt, max_tokens=load["max_tokens"])


@pytest.mark.parametrize("parallel", [1, 3, 16])
@pytest.mark.parametrize("places", [(6, 6), (20, 4)])
def test_two_tenants_with_equal_turns_get_equal_engine_time_over_a_minute(
    parallel: int, places: tuple[int, int]
) -> None:
    """However many turns each of them has waiting, as long as both have enough."""
    harness = paced(parallel=parallel)
    load = {"prompt_tokens": 300, "max_tokens": 20}
    turns = {
        salt: [harness.submit([salt[0], at], salt=salt, max_tokens=1) for at in range(count)]
        for salt, count in zip((A, B), places, strict=True)
    }
    watch = Stopwatch(harness)
    while now_s(harness) < 60:
        keep_asking(harness, turns, **load)
        watch.step()
    assert watch.used_s[B] == pytest.approx(watch.used_s[A], rel=0.1)


def test_a_tenant_that_decodes_gets_its_share_next_to_one_that_sends_prompts() -> None:
    harness = paced(parallel=8)
    for at in range(2):
        harness.submit([1, at], salt=A, max_tokens=4000)
    watch = Stopwatch(harness)
    turns = {B: [harness.submit([2, at], salt=B, max_tokens=1) for at in range(4)]}
    while now_s(harness) < 30:
        keep_asking(harness, turns, prompt_tokens=2000, max_tokens=1)
        watch.step()
    assert abs(watch.used_s[A] - watch.used_s[B]) <= MAX_LEAD_S + ALONE_S


def test_eight_tokens_begin_within_two_seconds_next_to_forty_long_urgent_turns() -> None:
    harness = paced(parallel=16)
    for at in range(40):
        prompt = list(range(at, at + 1500))
        harness.submit(prompt, salt=A, priority=10, max_tokens=64)
    while now_s(harness) < 20:
        harness.scheduler.step()
    asked_s, short = now_s(harness), harness.submit([7], salt=B, max_tokens=8)
    while not short.text:
        harness.scheduler.step()
    assert now_s(harness) - asked_s < 2


def test_a_short_prompt_does_not_share_its_step_with_the_long_ones_of_other_tenants() -> None:
    harness = paced(parallel=8)
    for at in range(4):
        harness.submit(list(range(at, at + 3000)), salt=A, max_tokens=1)
    while now_s(harness) < 5:
        harness.scheduler.step()
    asked_s, short = now_s(harness), harness.submit([7] * 20, salt=B, max_tokens=1)
    harness.scheduler.step()
    assert short.ended
    assert now_s(harness) - asked_s < 0.1


def test_a_turn_that_waits_takes_a_place_of_a_tenant_that_holds_all_of_them() -> None:
    alone = paced(parallel=4)
    undisturbed = [alone.ask([at, at], salt=A, max_tokens=800).tokens for at in range(4)]
    harness = paced(parallel=4)
    long = [harness.submit([at, at], salt=A, max_tokens=800) for at in range(4)]
    harness.scheduler.step()
    asked_s, short = now_s(harness), harness.submit([9], salt=B, max_tokens=1)
    harness.run(short)
    assert now_s(harness) - asked_s < 2 * MAX_WAIT_S
    assert harness.kv.counts.preemptions == 1
    harness.run(*long)
    assert [reply.tokens for reply in long] == undisturbed


def test_a_turn_that_waits_gets_the_memory_of_a_tenant_that_holds_all_of_it() -> None:
    engine = PacedEngine(pool_tokens=512, context_tokens=512)
    harness = paced(engine, parallel=4)
    long = [harness.submit([at] * 150, salt=A, max_tokens=100) for at in range(3)]
    for _ in range(10):
        harness.scheduler.step()
    asked_s, other = now_s(harness), harness.submit([9] * 100, salt=B, max_tokens=1)
    harness.run(other)
    assert now_s(harness) - asked_s < 2 * MAX_WAIT_S
    harness.run(*long)
    assert all(len(reply.tokens) == 100 for reply in long)


def test_tenants_that_have_their_share_keep_their_places() -> None:
    harness = paced(parallel=4)
    long = [
        harness.submit([at, at], salt=salt, max_tokens=200) for at in range(6) for salt in (A, B)
    ]
    harness.run(*long)
    assert harness.kv.counts.preemptions == 0


def test_turns_of_one_tenant_do_not_take_each_others_places() -> None:
    harness = paced(parallel=1)
    harness.submit([1], salt=A, max_tokens=300)
    later = harness.submit([2], salt=A, priority=10, max_tokens=1)
    harness.run(later)
    assert harness.kv.counts.preemptions == 0


def test_two_tenants_alternate_in_a_single_place() -> None:
    harness = paced(parallel=1)
    replies = [harness.submit([at], salt=salt, max_tokens=400) for at, salt in ((1, A), (2, B))]
    watch = Stopwatch(harness)
    while not any(reply.ended for reply in replies):
        watch.step()
        assert abs(watch.used_s[A] - watch.used_s[B]) < 3 * MAX_WAIT_S
    assert harness.kv.counts.preemptions > 3


def test_only_priority_that_an_admin_key_sends_counts_against_other_tenants() -> None:
    for outranks in (False, True):
        harness = busy()
        own = harness.submit([5], salt=C, max_tokens=1)
        urgent = [
            harness.submit([10 + at], salt=B, priority=9, outranks=outranks, max_tokens=1)
            for at in range(4)
        ]
        harness.run(*urgent)
        assert own.ended is not outranks


def test_an_urgent_turn_of_an_admin_key_takes_the_place_of_any_other_tenant() -> None:
    harness = paced(parallel=2)
    for salt in (A, B):
        harness.submit([5], salt=salt, max_tokens=3000)
    harness.submit([6], salt=C, max_tokens=1)
    urgent = harness.submit([7], salt=C, priority=1, outranks=True, max_tokens=1)
    harness.run(urgent)
    assert now_s(harness) < 2 * MAX_WAIT_S
