"""Encodes requests into tokens on threads of their own, serving tenants in turn."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from rekindle.fair_queue import FairQueue
from rekindle.protocol.events import Cancelled

LARGE_BYTES = 64 << 10  # encoding a larger request takes long enough to delay small ones

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Job(Generic[T]):
    """A request that waits to be encoded."""

    tenant: bytes
    size_bytes: int
    encode: Callable[[], Sequence[T]]  # returns one result per turn, or one in all; never raises
    turns: tuple[int, ...] = ()  # empty if the request does not generate anything


class Encoders(Generic[T]):
    """The encoder threads. Any thread may call this class.

    `deliver` receives the outcome of every turn: a result of `encode`, or Cancelled.
    """

    def __init__(self, deliver: Callable[[T | Cancelled], None]) -> None:
        self._deliver = deliver
        self._changed = threading.Condition()
        self._small: FairQueue[Job[T]] = FairQueue()
        self._large: FairQueue[Job[T]] = FairQueue()
        self._turns: dict[int, Job[T]] = {}  # of jobs that wait or are being encoded
        # One thread takes small requests only, so they never wait for large ones.
        for queues in ((self._small,), (self._large, self._small)):
            threading.Thread(target=self._run, args=queues, name="encoder", daemon=True).start()

    def submit(self, job: Job[T]) -> None:
        queue = self._large if job.size_bytes > LARGE_BYTES else self._small
        with self._changed:
            queue.put(job.tenant, job)
            self._turns |= dict.fromkeys(job.turns, job)
            self._changed.notify_all()

    def cancel(self, turn: int) -> bool:
        """Cancel a turn. Returns False if it is not being encoded.

        A job is dropped when all its turns are cancelled. A job that has begun cannot be
        interrupted, and its result is discarded.
        """
        with self._changed:
            job = self._turns.pop(turn, None)
            if job is None:
                return False
            if not any(other in self._turns for other in job.turns):
                self._small.remove(job.tenant, job)
                self._large.remove(job.tenant, job)
            self._deliver(Cancelled(turn))
            return True

    def _run(self, *queues: FairQueue[Job[T]]) -> None:
        while True:
            job = self._next(queues)
            self._finish(job, job.encode())
            del job  # free its memory before waiting for the next job

    def _next(self, queues: tuple[FairQueue[Job[T]], ...]) -> Job[T]:
        with self._changed:
            while True:
                for queue in queues:
                    if job := queue.pop():
                        return job
                self._changed.wait()

    def _finish(self, job: Job[T], results: Sequence[T]) -> None:
        with self._changed:  # `cancel` must find a turn either here or after its delivery
            for turn, result in zip(job.turns or (None,), results, strict=True):
                if turn is None or self._turns.pop(turn, None) is not None:
                    self._deliver(result)
