"""Replies that go on by themselves: the engine computes step after step while nobody else wants it
(multi-step scheduling, as vLLM calls it).

What happens between two steps, looking for messages, for turns to admit, for state to move, takes
as long as a small model's step itself, and is the same from step to step.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from rekindle.engine.base import GoOn, Sampled
from rekindle.runtime.batch import Batch
from rekindle.runtime.delivery import Delivery
from rekindle.runtime.turn import Turn

MOST_S = 0.02  # before everything else is looked at again


def _never() -> bool:
    return False


class ReplyRun:
    """The steps that are computed in one call of the engine."""

    def __init__(self, delivery: Delivery) -> None:
        #: Whether the engine's thread has nothing to do but the turns that run.
        self.is_undisturbed: Callable[[], bool] = _never
        self.steps = 1
        self._delivery = delivery
        self._batch: Batch = []
        self._first_s = self._began_s = 0.0  # when the first step began, and the one under way

    def begin(self, batch: Batch, *, may_run_on: bool) -> GoOn | None:
        """A step begins; None: it is one alone."""
        self._batch, self.steps = batch, 1
        self._first_s = self._began_s = time.perf_counter()
        is_run = may_run_on and self.is_undisturbed() and all(map(_may_run_on, batch))
        return self._go_on if is_run else None

    def end(self) -> float:
        """How long a step took on average, with delivering between two of them."""
        return (time.perf_counter() - self._first_s) / self.steps

    def _go_on(self, results: list[Sampled | None]) -> bool:
        now_s = time.perf_counter()
        took_s = now_s - self._began_s
        if now_s + took_s > self._first_s + MOST_S or not self.is_undisturbed():
            return False
        for (turn, _), sampled in zip(self._batch, results, strict=True):
            if sampled is None or turn.output.is_last(sampled.token, turn.generated_tokens):
                return False
        self._began_s = now_s
        self.steps += 1
        self._delivery.take_on(self._batch, results, took_s)
        return True


def _may_run_on(piece: tuple[Turn, object]) -> bool:
    """Whether nothing but tokens decides about the next steps of a turn."""
    turn = piece[0]
    return turn.is_decoding and turn.only_goes_on and turn.output.ends_by_token
