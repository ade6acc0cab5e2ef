"""Tenants take turns, whether they wait in a queue or for a slot."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from rekindle.fair_queue import FairQueue, FairShare, FairSlots

PATIENCE_S = 20.0


def run(work: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await work

    asyncio.run(bounded())


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


class Users:
    """Takes slots, and records who got one in which order."""

    def __init__(self, slots: int) -> None:
        self.slots = FairSlots(slots)
        self.order: list[str] = []
        self.go = asyncio.Event()

    async def use(self, name: str) -> None:
        async with self.slots.slot(name[:1].encode()):
            self.order.append(name)
            await self.go.wait()

    def start(self, name: str) -> asyncio.Task[None]:
        return asyncio.create_task(self.use(name))


def queue(*items: str) -> FairQueue[str]:
    """A queue of items whose first letter is the tenant."""
    made: FairQueue[str] = FairQueue()
    for item in items:
        made.put(item[:1].encode(), item)
    return made


def popped(items: FairQueue[str]) -> list[str]:
    return list(iter(items.pop, None))


def test_skipped_tenants_keep_their_place() -> None:
    items = queue("a1", "a2", "b1", "c1")
    assert items.pop(skip={b"a"}) == "b1"
    assert items.pop(skip={b"a", b"c"}) is None
    assert popped(items) == ["a1", "c1", "a2"]


def test_tenants_take_turns_and_each_keeps_its_order() -> None:
    items = queue("a1", "a2", "a3", "b1", "c1", "b2")
    assert len(items) == 6
    assert popped(items) == ["a1", "b1", "c1", "a2", "b2", "a3"]
    assert not items


def test_a_removed_item_is_skipped_and_removing_it_again_does_nothing() -> None:
    items = queue("a1", "b1", "b2")
    for _ in range(2):
        items.remove(b"a", "a1")
        items.remove(b"b", "b1")
    assert popped(items) == ["b2"]


def test_rotating_lets_the_next_tenant_begin() -> None:
    items = queue("a1", "a2", "b1")
    items.rotate()
    assert popped(items) == ["b1", "a1", "a2"]
    items.rotate()
    assert popped(items) == []


def test_a_copy_is_independent() -> None:
    items = queue("a1", "b1", "a2")
    assert popped(items.copy()) == ["a1", "b1", "a2"]
    assert sorted(items) == ["a1", "a2", "b1"]


def shares() -> FairShare[str]:
    return FairShare(lambda item: item[:1].encode())


def test_the_tenant_that_has_received_least_comes_first() -> None:
    share = shares()
    share.charge(b"a", 5)
    share.charge(b"b", 2)
    assert share.order([b"a", b"b", b"c"]) == [b"c", b"b", b"a"]
    share.charge(b"b", 3)
    assert share.order([b"b", b"a"]) == [b"b", b"a"]  # equal ones keep their order


def test_items_of_tenants_are_interleaved_and_each_keeps_its_order() -> None:
    share = shares()
    share.charge(b"a", 1)
    assert share.interleave(["a1", "a2", "b1", "c1", "b2"]) == ["b1", "c1", "a1", "b2", "a2"]
    assert share.interleave([]) == []


def test_a_pause_earns_no_credit() -> None:
    share = shares()
    share.charge(b"b", 1)
    for _ in range(100):
        share.charge(b"a", 1)
    served = []
    for _ in range(6):
        [tenant, _] = share.order([b"a", b"b"])
        share.charge(tenant, 1)
        served.append(tenant)
    assert served == [b"b", b"a", b"b", b"a", b"b", b"a"]


def test_a_share_remembers_only_tenants_that_are_ahead() -> None:
    share = shares()
    for number in range(1000):
        share.charge(b"%d" % number, 1)
        share.charge(b"x", 1)
    assert len(share._received) <= 2


def test_tenants_get_slots_in_turn() -> None:
    async def work() -> None:
        users = Users(1)
        tasks = [users.start(name) for name in ("a0", "a1", "a2", "a3", "b1", "b2", "c1")]
        await settle()
        assert users.order == ["a0"]
        users.go.set()
        await asyncio.gather(*tasks)
        assert users.order == ["a0", "a1", "b1", "c1", "a2", "b2", "a3"]

    run(work())


def test_no_more_slots_are_held_than_there_are() -> None:
    async def work() -> None:
        users = Users(2)
        tasks = [users.start(name) for name in ("a1", "a2", "a3")]
        await settle()
        assert users.order == ["a1", "a2"]
        users.go.set()
        await asyncio.gather(*tasks)

    run(work())


def test_a_cancelled_waiter_takes_no_slot() -> None:
    async def work() -> None:
        users = Users(1)
        first, cancelled, last = (users.start(name) for name in ("a1", "b1", "c1"))
        await settle()
        cancelled.cancel()
        users.go.set()
        await asyncio.gather(first, last)
        assert users.order == ["a1", "c1"]
        await users.use("d1")

    run(work())


def test_a_cancelled_waiter_does_not_use_its_tenants_turn() -> None:
    async def work() -> None:
        users = Users(1)
        tasks = [users.start(name) for name in ("a0", "b1", "b2", "c1", "c2")]
        await settle()
        tasks[1].cancel()
        await settle()
        users.go.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert users.order == ["a0", "b2", "c1", "c2"]

    run(work())


def test_a_waiter_cancelled_just_as_it_gets_its_slot_returns_it() -> None:
    async def work() -> None:
        users = Users(1)
        first, cancelled = users.start("a1"), users.start("b1")
        await settle()
        users.go.set()
        await first  # b1 has the slot now, but has not run yet
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        await users.use("c1")
        assert users.order[-1] == "c1"

    run(work())
