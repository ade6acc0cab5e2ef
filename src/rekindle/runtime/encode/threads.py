"""The encoder threads: requests become tokens beside the engine, no tenant's at another's cost."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from rekindle.protocol.events import Cancelled

THREADS = 2  # one of them takes no large request
LARGE_BYTES = 64 << 10  # of a request: encoding more takes long enough to be in the way

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Job(Generic[T]):
    """A request that is to be encoded."""

    tenant: bytes
    size_bytes: int
    encode: Callable[[], Sequence[T]]  # a result for each turn, or one; raises nothing
    turns: tuple[int, ...] = ()  # none: it is about something else


class Lane(Generic[T]):
    """Jobs that wait: those of a tenant in their order, the tenants in turn."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[bytes, deque[Job[T]]] = OrderedDict()  # whose turn it is first

    def put(self, job: Job[T]) -> None:
        self._waiting.setdefault(job.tenant, deque()).append(job)

    def take(self) -> Job[T] | None:
        """The next job, if there is one."""
        if not self._waiting:
            return None
        tenant, jobs = self._waiting.popitem(last=False)
        job = jobs.popleft()
        if jobs:
            self._waiting[tenant] = jobs  # behind the other tenants
        return job

    def remove(self, job: Job[T]) -> None:
        """Forget a job, if it waits here."""
        jobs = self._waiting.get(job.tenant)
        if jobs is not None and job in jobs:
            jobs.remove(job)
            if not jobs:
                del self._waiting[job.tenant]


class Encoders(Generic[T]):
    """Any thread may call it. `deliver` gets what becomes of each turn: its result or Cancelled."""

    def __init__(self, deliver: Callable[[T | Cancelled], None], *, threads: int = THREADS) -> None:
        self._deliver = deliver
        self._changed = threading.Condition()
        self._small: Lane[T] = Lane()
        self._large: Lane[T] = Lane()
        self._turns: dict[int, Job[T]] = {}  # that wait or are being encoded
        for number in range(threads):
            lanes = (self._large, self._small) if number else (self._small,)
            threading.Thread(target=self._run, args=lanes, name="encoder", daemon=True).start()

    def submit(self, job: Job[T]) -> None:
        lane = self._large if job.size_bytes > LARGE_BYTES else self._small
        with self._changed:
            lane.put(job)
            self._turns |= dict.fromkeys(job.turns, job)
            self._changed.notify_all()

    def cancel(self, turn: int) -> bool:
        """Give a turn up; False when it is not here. A job of no more turns is not begun; one that
        was begun cannot be interrupted, and leads to nothing."""
        with self._changed:
            job = self._turns.pop(turn, None)
            if job is None:
                return False
            if not any(other in self._turns for other in job.turns):
                self._small.remove(job)
                self._large.remove(job)
            self._deliver(Cancelled(turn))
            return True

    def _run(self, *lanes: Lane[T]) -> None:
        while True:
            job = self._next(lanes)
            self._end(job, job.encode())
            del job  # it is large, and the next one may be long in coming

    def _next(self, lanes: tuple[Lane[T], ...]) -> Job[T]:
        with self._changed:
            while True:
                for lane in lanes:
                    if job := lane.take():
                        return job
                self._changed.wait()

    def _end(self, job: Job[T], results: Sequence[T]) -> None:
        with self._changed:  # so that `cancel` finds a turn here, or after it was delivered
            for turn, result in zip(job.turns or (None,), results, strict=True):
                if turn is None or self._turns.pop(turn, None) is not None:
                    self._deliver(result)
