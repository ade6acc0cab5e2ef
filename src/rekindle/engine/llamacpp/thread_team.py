"""Shares one computation between a few threads.

The threads sleep while they wait. Busy waiting would start a little sooner, but as soon as another
process wants a core (the chat model's, for example), it takes that core from the working thread.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from queue import SimpleQueue
from threading import Thread

MIN_WORK = 7_000_000  # multiplications, about 80 us: for less no thread is woken
WAKING_WORK = 2_500_000  # multiplications that the caller could do while it wakes a thread

Part = Callable[[], None]
Compute = Callable[[slice], None]  # computes a range of items
Share = Callable[[Compute, int, int], None]  # the signature of ThreadTeam.share


def alone(compute: Compute, count: int, _item_work: int) -> None:
    """Compute all items in the calling thread."""
    compute(slice(0, count))


class ThreadTeam:
    """Threads that help one caller at a time."""

    def __init__(self, size: int, name: str) -> None:
        """`size` includes the calling thread."""
        self.size = size
        self._parts: SimpleQueue[Part | None] = SimpleQueue()
        self._ended: SimpleQueue[BaseException | None] = SimpleQueue()
        self._threads = [
            Thread(target=self._serve, name=name, daemon=True) for _ in range(size - 1)
        ]
        for thread in self._threads:
            thread.start()

    def share(self, compute: Compute, count: int, item_work: int) -> None:
        """Compute items 0 to `count`, which take `item_work` multiplications each.

        The caller takes a few more items than the others, because it has to wake them. Raises one
        of the exceptions of the parts, after all of them have ended.
        """
        parts = max(min(self.size, count, count * item_work // MIN_WORK), 1)
        ahead = min(WAKING_WORK // item_work * (parts - 1), count - parts)
        rest = count - ahead
        bounds = [0, *(count - rest * part // parts for part in range(parts - 1, -1, -1))]
        own, *others = (slice(*pair) for pair in pairwise(bounds))
        for part in others:
            self._parts.put(partial(compute, part))
        failures: list[BaseException | None] = []
        try:
            compute(own)
        finally:
            failures = [self._ended.get() for _ in others]
        for failure in filter(None, failures):
            raise failure

    def _serve(self) -> None:
        while part := self._parts.get():
            failure: BaseException | None = None
            try:
                part()
            except BaseException as error:  # raised again in the calling thread
                failure = error
            self._ended.put(failure)

    def close(self) -> None:
        for _ in self._threads:
            self._parts.put(None)
        for thread in self._threads:
            thread.join()
