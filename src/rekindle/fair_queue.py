"""Serves tenants in turn, so that one tenant with a long queue does not delay the others."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Container, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from itertools import chain, zip_longest
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """A round-robin queue over tenants. The items of one tenant keep their order."""

    def __init__(self) -> None:
        self._items: OrderedDict[bytes, deque[T]] = OrderedDict()  # the next tenant comes first

    def __len__(self) -> int:
        return sum(map(len, self._items.values()))

    def __iter__(self) -> Iterator[T]:
        return (item for items in self._items.values() for item in items)

    def put(self, tenant: bytes, item: T) -> None:
        self._items.setdefault(tenant, deque()).append(item)

    def pop(self, skip: Container[bytes] = ()) -> T | None:
        """Remove and return the next item of a tenant that is not in `skip`, or None."""
        tenant = next((each for each in self._items if each not in skip), None)
        if tenant is None:
            return None
        items = self._items.pop(tenant)
        item = items.popleft()
        if items:
            self._items[tenant] = items  # behind the other tenants
        return item

    def remove(self, tenant: bytes, item: T) -> None:
        """Remove an item, if it is still in the queue."""
        items = self._items.get(tenant, deque())
        if item in items:
            items.remove(item)
            if not items:
                del self._items[tenant]

    def rotate(self) -> None:
        """Move the first tenant behind the others, without removing an item."""
        if self._items:
            self._items.move_to_end(next(iter(self._items)))

    def copy(self) -> FairQueue[T]:
        copied: FairQueue[T] = FairQueue()
        copied._items.update((tenant, deque(items)) for tenant, items in self._items.items())
        return copied


class FairShare(Generic[T]):
    """Orders tenants by what each has received, the least first.

    Time without work earns no credit: a tenant that comes back counts as having received as much as
    the tenant that was served last. This is start-time fair queueing with equal weights.
    """

    def __init__(self, tenant_of: Callable[[T], bytes]) -> None:
        self._tenant_of = tenant_of
        self._level = 0  # what the last served tenant had received before it was served
        self._received: dict[bytes, int] = {}  # of tenants above the level

    def charge(self, tenant: bytes, amount: int) -> None:
        """Record what a tenant has received, in any unit."""
        if not amount:
            return
        self._level = before = self._received_by(tenant)
        self._received[tenant] = before + amount
        above = self._received.items()
        self._received = {each: received for each, received in above if received > before}

    def order(self, tenants: Iterable[bytes]) -> list[bytes]:
        """The tenants that have received least come first. Equal ones keep their order."""
        return sorted(tenants, key=self._received_by)

    def interleave(self, items: Iterable[T]) -> list[T]:
        """Return the first item of each tenant, then the second of each, and so on. The items of a
        tenant keep their order."""
        by_tenant: dict[bytes, list[T]] = {}
        for item in items:
            by_tenant.setdefault(self._tenant_of(item), []).append(item)
        return interleaved(by_tenant[tenant] for tenant in self.order(by_tenant))

    def _received_by(self, tenant: bytes) -> int:
        return max(self._received.get(tenant, 0), self._level)


def interleaved(groups: Iterable[Iterable[T]]) -> list[T]:
    """Return the first item of each group, then the second of each, and so on."""
    rounds = zip_longest(*groups)
    return [item for item in chain.from_iterable(rounds) if item is not None]


class EngineShare:
    """Orders tenants by the engine time that each has received, the least first.

    Several tenants receive time in one step, so the level is what the least served tenant with
    turns has received. A tenant that was away comes back at this level: a pause earns no credit.
    """

    # A tenant that could use only little of its share is at most this far behind the others. So
    # when it needs more, it does not stop them for longer than this.
    MAX_LAG_S = 5.0

    def __init__(self) -> None:
        self._level_s = 0.0
        self._received_s: dict[bytes, float] = {}  # of tenants above the level

    def charge(self, used_s: Mapping[bytes, float], active: Iterable[bytes]) -> None:
        """Record the time that tenants have used. `active` are the tenants that have turns."""
        for tenant, more_s in used_s.items():
            self._received_s[tenant] = self.received_s(tenant) + more_s
        present_s = [self.received_s(tenant) for tenant in active]
        if present_s:
            lowest_s = max(min(present_s), max(present_s) - self.MAX_LAG_S)
            self._level_s = max(self._level_s, lowest_s)
        received = self._received_s.items()
        self._received_s = {tenant: time_s for tenant, time_s in received if time_s > self._level_s}

    def received_s(self, tenant: bytes) -> float:
        """Engine time of a tenant. Only differences between tenants have a meaning."""
        return max(self._received_s.get(tenant, 0.0), self._level_s)


class FairSlots:
    """An asyncio semaphore that wakes waiting tenants in turn."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: FairQueue[asyncio.Future[None]] = FairQueue()

    @asynccontextmanager
    async def slot(self, tenant: bytes) -> AsyncIterator[None]:
        await self._acquire(tenant)
        try:
            yield
        finally:
            self._release()

    async def _acquire(self, tenant: bytes) -> None:
        if self._free:
            self._free -= 1
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.put(tenant, waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self._release()  # cancelled just after it got the slot
            else:
                self._waiting.remove(tenant, waiter)
            raise

    def _release(self) -> None:
        while waiter := self._waiting.pop():
            if not waiter.done():  # it may have been cancelled just now
                waiter.set_result(None)
                return
        self._free += 1
