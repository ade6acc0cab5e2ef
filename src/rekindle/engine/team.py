"""Threads that share one computation with the thread that asks for it.

They sleep while there is nothing to do. Threads that wait busily start a little sooner, but as
soon as another process wants a core, as the chat model's does, they take it from the very thread
that they wait for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from queue import SimpleQueue
from threading import Thread

LEAST_WORK = 7_000_000  # multiplications, about 80 us: for less no thread is woken
WAKING_WORK = 2_500_000  # that could be done meanwhile

Part = Callable[[], None]
Compute = Callable[[slice], None]  # of some items
Share = Callable[[Compute, int, int], None]  # see Team.share


def alone(compute: Compute, count: int, _item_work: int) -> None:
    """A `Share` with nobody."""
    compute(slice(0, count))


class Team:
    """One thread at a time may ask."""

    def __init__(self, size: int, name: str) -> None:
        """`size` counts the thread that asks."""
        self.size = size
        self._parts: SimpleQueue[Part | None] = SimpleQueue()
        self._ended: SimpleQueue[BaseException | None] = SimpleQueue()
        self._threads = [
            Thread(target=self._serve, name=name, daemon=True) for _ in range(size - 1)
        ]
        for thread in self._threads:
            thread.start()

    def share(
        self, compute: Compute, count: int, item_work: int, *, most: int | None = None
    ) -> None:
        """Compute items 0 to `count`, which are so many multiplications each, on `most` threads at
        most. The asking thread takes a few more than the others, which it has to wake. Of what
        fails, one is raised."""
        parts = max(min(most or self.size, self.size, count, count * item_work // LEAST_WORK), 1)
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
            except BaseException as error:  # told to the thread that waits
                failure = error
            self._ended.put(failure)

    def close(self) -> None:
        for _ in self._threads:
            self._parts.put(None)
        for thread in self._threads:
            thread.join()
