"""Tenants take turns: the many turns of one do not delay the few of another."""

from __future__ import annotations

from typing import Any

import pytest

from tests.runtime.device.test_images_picture_encoder import seeing
from tests.support.fake import CELL_BYTES, FakeEngine
from tests.support.harness import Reply, RuntimeHarness
from tests.support.pictures import drawn

A, B, C = b"a", b"b", b"c"
BLOCK_BYTES = 8 * CELL_BYTES


def busy(parallel: int = 1, **engine: Any) -> RuntimeHarness:
    """A harness whose only place is taken by tenant A."""
    harness = RuntimeHarness(FakeEngine(**engine), parallel=parallel)
    harness.submit([1], salt=A, max_tokens=3)
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
    assert starts(busy(), *urgent, ("b", 0))[0] == "b"


def test_tenants_start_turns_alternately() -> None:
    turns = ["a1", "a2", "a3", "b1", "b2", "c1"]
    assert starts(busy(), *((name, 0) for name in turns)) == ["b1", "c1", "a1", "b2", "a2", "a3"]


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
    assert starts(busy(), *turns) == ["b2", "a2", "b1", "a1"]


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
    engine = FakeEngine(context_tokens=4096, pool_tokens=32768)
    harness = RuntimeHarness(engine, parallel=8)
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
