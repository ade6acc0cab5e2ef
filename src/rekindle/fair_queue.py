"""Serves tenants in turn, so that one tenant with a long queue does not delay the others."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
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

    def pop(self) -> T | None:
        """Remove and return the next item, or None if the queue is empty."""
        if not self._items:
            return None
        tenant, items = self._items.popitem(last=False)
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


class FairSlots:
    """An asyncio semaphore that wakes waiting tenants in turn."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: FairQueue[asyncio.Future[None]] = FairQueue()

    @asynccontextmanager
    async def slot(self, tenant: bytes) -> AsyncIterator[None]:
        """Wait for a slot and hold it."""
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
