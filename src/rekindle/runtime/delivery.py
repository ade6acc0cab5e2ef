"""What the steps of the engine bring, on its way to the turns and their clients."""

from __future__ import annotations

from collections.abc import Callable

from rekindle.engine.base import Sampled, Work
from rekindle.protocol.events import TERMINAL, Event, Prefill
from rekindle.runtime.batch import Batch
from rekindle.runtime.pipeline import Pipeline
from rekindle.runtime.turn import Turn

REPORT_S = 1.0  # between two Prefill events of a turn whose client did not ask for them

Emit = Callable[[list[Event]], None]


class Delivery:
    """A token belongs to its turn at once; its text may be delivered later, while the next step is
    computed. `on_end` is called for turns that have ended."""

    def __init__(self, pipeline: Pipeline, emit: Emit, on_end: Callable[[Turn], None]) -> None:
        self._pipeline = pipeline
        self._emit = emit
        self._on_end = on_end
        self.brought: list[tuple[Turn, Sampled | None]] = []  # by the last step: not delivered

    def take_in(self, batch: Batch, results: list[Sampled | None], took_s: float) -> bool:
        """Give turns their tokens, but for those that have ended meanwhile. Whether all of the
        replies only go on, so that what they say can wait."""
        may_wait = True
        events: list[Event] = []
        for (turn, work), sampled in zip(batch, results, strict=True):
            if turn.sampler is None and sampled is not None:
                continue  # it has ended
            may_wait = may_wait and turn.only_goes_on
            _account(turn, work, took_s, events)
            if sampled is not None:
                turn.take(sampled)
            self.brought.append((turn, sampled))
        if events:
            self._emit(events)
        return may_wait

    def deliver(self) -> None:
        """Tell clients what the last step brought."""
        events: list[Event] = []
        brought, self.brought = self.brought, []
        for turn, sampled in brought:
            parts = self._pipeline.accept(turn, sampled)
            events += parts
            if parts and isinstance(parts[-1], TERMINAL):
                self._on_end(turn)
        if events:
            self._emit(events)  # before keeping: clients do not wait for that


def _account(turn: Turn, work: Work, took_s: float, events: list[Event]) -> None:
    """What a step was to one of its turns; how far its prompt is, now and then."""
    turn.slice_tokens += len(work.tokens)
    if turn.shown and not turn.next_picture:
        turn.shown = None
    if not turn.generated_tokens:
        turn.prompt_eval_s += took_s
        turn.unreported_s += took_s
        if turn.request.progress or turn.unreported_s >= REPORT_S:
            turn.unreported_s = 0.0
            events.append(Prefill(turn.id, turn.held_tokens, turn.prompt_tokens))
