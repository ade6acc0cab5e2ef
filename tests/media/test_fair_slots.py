from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from rekindle.media.fair_slots import FairSlots

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
    """Takes slots, and notes who had one in which order."""

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


def test_tenants_that_wait_are_served_in_turn() -> None:
    async def work() -> None:
        users = Users(1)
        tasks = [users.start(name) for name in ("a0", "a1", "a2", "a3", "b1", "b2", "c1")]
        await settle()
        assert users.order == ["a0"]
        users.go.set()
        await asyncio.gather(*tasks)
        assert users.order == ["a0", "a1", "b1", "c1", "a2", "b2", "a3"]

    run(work())


def test_no_more_are_served_at_a_time_than_there_are_slots() -> None:
    async def work() -> None:
        users = Users(2)
        tasks = [users.start(name) for name in ("a1", "a2", "a3")]
        await settle()
        assert users.order == ["a1", "a2"]
        users.go.set()
        await asyncio.gather(*tasks)

    run(work())


def test_one_that_is_given_up_while_it_waits_takes_no_slot() -> None:
    async def work() -> None:
        users = Users(1)
        first, given_up, last = (users.start(name) for name in ("a1", "b1", "c1"))
        await settle()
        given_up.cancel()
        users.go.set()
        await asyncio.gather(first, last)
        assert users.order == ["a1", "c1"]
        await users.use("d1")

    run(work())


def test_one_that_is_given_up_just_when_it_gets_its_slot_gives_it_back() -> None:
    async def work() -> None:
        users = Users(1)
        first, given_up = users.start("a1"), users.start("b1")
        await settle()
        users.go.set()
        await first  # the slot is b1's now, and it has not run yet
        given_up.cancel()
        await asyncio.gather(given_up, return_exceptions=True)
        await users.use("c1")
        assert users.order[-1] == "c1"

    run(work())
