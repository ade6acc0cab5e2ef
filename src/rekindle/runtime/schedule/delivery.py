"""What the steps of the engine bring, on its way to the turns and their clients."""

from __future__ import annotations

import time
from collections.abc import Callable

from rekindle.engine.base import GoOn, Sampled, Work
from rekindle.protocol.events import (
    TERMINAL,
    ArgumentsDelta,
    Delta,
    Event,
    Part,
    Prefill,
    ReasoningDelta,
    TextDelta,
)
from rekindle.runtime.schedule.batch import Batch
from rekindle.runtime.schedule.pipeline import Pipeline
from rekindle.runtime.schedule.turn import Turn

REPORT_S = 1.0  # between two Prefill events of a turn whose client did not ask for them
TOGETHER_S = 0.004  # that a token waits at most, to be delivered together with the next ones

Emit = Callable[[list[Event]], None]


class Delivery:
    """A token belongs to its turn at once; its text may be delivered later: while the next step is
    computed, if the engine computes `beside`, and where steps are short together with the tokens
    of those that follow. `on_end` is called for turns that have ended."""

    def __init__(
        self, pipeline: Pipeline, emit: Emit, on_end: Callable[[Turn], None], *, beside: bool
    ) -> None:
        self._pipeline = pipeline
        self._emit = emit
        self._on_end = on_end
        self._beside = beside
        self.brought: list[tuple[Turn, Sampled | None]] = []  # by the last steps: not delivered
        self.is_due = False  # what was brought would wait too long for another step
        self._since_s = 0.0  # when the first of it came

    def take_in(self, batch: Batch, results: list[Sampled | None], took_s: float) -> bool:
        """Give turns their tokens, but for those that have ended meanwhile. Whether what was
        brought is to be delivered before the next step."""
        may_wait = may_gather = True
        events: list[Event] = []
        brought: list[tuple[Turn, Sampled | None]] = []
        for (turn, work), sampled in zip(batch, results, strict=True):
            if turn.sampler is None and sampled is not None:
                continue  # it has ended
            may_wait = may_wait and turn.only_goes_on and not turn.pending_tokens
            _account(turn, work, took_s, events)
            if sampled is not None:
                turn.take(sampled)
            may_gather = may_gather and not turn.is_over and turn.output.ends_by_token
            brought.append((turn, sampled))
        if events:
            self._emit(events)
        self._gather(brought, took_s)
        self.is_due = self.is_due or not may_gather
        return not may_wait or (self.is_due and not self._beside)

    def take_on(self, batch: Batch, results: list[Sampled | None], took_s: float) -> None:
        """Give replies that go on by themselves their tokens, none of which is the last."""
        brought: list[tuple[Turn, Sampled | None]] = []
        for (turn, _), sampled in zip(batch, results, strict=True):
            assert sampled is not None
            turn.tokens.append(sampled.token)
            brought.append((turn, sampled))
        self._gather(brought, took_s)
        if not self._beside:
            self.deliver_due()

    def _gather(self, brought: list[tuple[Turn, Sampled | None]], took_s: float) -> None:
        """It is due if what came first would wait too long for another step like this one."""
        now_s = time.monotonic()
        if not self.brought:
            self._since_s = now_s
        self.brought += brought
        self.is_due = now_s - self._since_s + took_s > TOGETHER_S

    def hurry(self) -> None:
        """A step begins that is long: what was brought does not wait for its end."""
        self.is_due = bool(self.brought)
        if not self._beside:
            self.deliver_due()

    def deliver_due(self) -> None:
        """Deliver, unless what the next step brings can be delivered with it."""
        if self.is_due:
            self.deliver()

    def deliver(self) -> None:
        """Tell clients what the last steps brought."""
        events: list[Event] = []
        brought, self.brought, self.is_due = self.brought, [], False
        for turn, sampled in brought:
            parts = self._pipeline.accept(turn, sampled)
            events += parts
            if parts and isinstance(parts[-1], TERMINAL):
                self._on_end(turn)
        if events:
            self._emit(_joined(events))  # before keeping: clients do not wait for that


def _joined(events: list[Event]) -> list[Event]:
    """The same, parts of a turn's reply that go on with one another as one."""
    joined: list[Event] = []
    last: dict[int, Part | None] = {}  # of each turn, if its last event is one
    for event in events:
        part = event.part if isinstance(event, Delta) else None
        if part is None or not _goes_on(last.get(event.turn), part):
            joined.append(event)
            last[event.turn] = part
    return joined


def _goes_on(before: Part | None, part: Part) -> bool:
    """Whether a part goes on with the one before; then that has its text, too."""
    match before, part:
        case TextDelta(), TextDelta():
            if part.logprobs:
                before.logprobs = [*(before.logprobs or ()), *part.logprobs]
        case ReasoningDelta(), ReasoningDelta():
            pass
        case ArgumentsDelta(index), ArgumentsDelta(other) if index == other:
            pass
        case _:
            return False
    before.text += part.text
    return True


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


# ----------------------------------------------------------------------
# Replies that go on by themselves: the engine computes step after step while nobody else wants it
# (multi-step scheduling, as vLLM calls it).
#
# What happens between two steps, looking for messages, for turns to admit, for state to move,
# takes as long as a small model's step itself, and is the same from step to step.

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
