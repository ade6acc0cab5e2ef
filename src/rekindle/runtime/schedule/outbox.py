"""Collects sampled tokens and turns them into events for the clients.

A token belongs to its turn as soon as it is sampled. Turning it into text can wait: until the next
step has been launched if the device computes on its own, and for a few milliseconds where steps are
short, so that several tokens share one message.
"""

from __future__ import annotations

import time

from rekindle.engine.base import Sampled, Work
from rekindle.protocol.events import (
    ArgumentsDelta,
    Delta,
    Event,
    Part,
    Prefill,
    ReasoningDelta,
    TextDelta,
)
from rekindle.runtime.schedule.batch import Batch
from rekindle.runtime.schedule.turn import Turn

# Interval between Prefill events for a client that did not ask for progress.
PROGRESS_S = 1.0
# Longest time that a token waits for the next ones, to be delivered in one message.
MAX_DELAY_S = 0.004


class Outbox:
    """Sampled tokens whose text has not been delivered yet."""

    def __init__(self) -> None:
        self.is_due = False  # another step would delay the oldest token for too long
        self.must_flush = False  # the next step of a turn depends on what follows this one
        self.ended: list[Turn] = []  # turns whose last text was taken
        self._pending: list[tuple[Turn, Sampled | None]] = []
        self._oldest_s = 0.0  # when the first pending token was sampled

    def __bool__(self) -> bool:
        return bool(self._pending)

    def collect(self, batch: Batch, results: list[Sampled | None], step_s: float) -> list[Event]:
        """Give each turn the result of a step. Returns the progress reports of the prompts."""
        progress: list[Event] = []
        can_end = False  # a token, or its text, may end a reply
        collected: list[tuple[Turn, Sampled | None]] = []
        for (turn, work), sampled in zip(batch, results, strict=True):
            if turn.output.finish_reason is not None:
                continue  # its text ended while the step was in flight
            progress += _count_step(turn, work, step_s)
            must_flush = not turn.only_decodes or turn.pending_tokens > 0
            if sampled is not None:
                turn.take(sampled)
            self.must_flush = self.must_flush or must_flush
            can_end = can_end or turn.is_over or not turn.output.ends_by_token
            collected.append((turn, sampled))
        self._add(collected, step_s)
        self.is_due = self.is_due or can_end
        return progress

    def collect_decoded(self, batch: Batch, results: list[Sampled], step_s: float) -> None:
        """The same for a step of a multi-step decode, in which no reply ends."""
        collected: list[tuple[Turn, Sampled | None]] = []
        for (turn, _), sampled in zip(batch, results, strict=True):
            turn.tokens.append(sampled.token)
            collected.append((turn, sampled))
        self._add(collected, step_s)

    def _add(self, collected: list[tuple[Turn, Sampled | None]], step_s: float) -> None:
        now_s = time.monotonic()
        if not self._pending:
            self._oldest_s = now_s
        self._pending += collected
        self.is_due = now_s - self._oldest_s + step_s > MAX_DELAY_S

    def hasten(self) -> None:
        """Make pending text due now."""
        self.is_due = bool(self._pending)

    def take(self) -> list[Event]:
        """Return the text of all pending tokens as events. Turns that it ends join `ended`."""
        events: list[Event] = []
        pending, self._pending = self._pending, []
        self.is_due = self.must_flush = False
        for turn, sampled in pending:
            if sampled is not None:
                events += turn.accept(sampled)
            elif turn.request.prepare:
                turn.finish_prepared()
            if turn.output.finish_reason is not None:
                self.ended.append(turn)
        return _merged(events)

    def take_ended(self) -> list[Turn]:
        ended, self.ended = self.ended, []
        return ended


def _count_step(turn: Turn, work: Work, step_s: float) -> list[Event]:
    """Count a step for one of its turns. Returns the turn's progress if it is due."""
    turn.chunk_tokens += len(work.tokens)
    if turn.shown and not turn.next_picture:
        turn.shown = None
    if turn.generated_tokens:
        return []
    turn.prompt_eval_s += step_s
    turn.unreported_s += step_s
    if not turn.request.progress and turn.unreported_s < PROGRESS_S:
        return []
    turn.unreported_s = 0.0
    return [Prefill(turn.id, turn.held_tokens, turn.prompt_tokens)]


def _merged(events: list[Event]) -> list[Event]:
    """Merge consecutive deltas of a turn that continue each other."""
    merged: list[Event] = []
    last: dict[int, Part | None] = {}  # the last part of each turn, None after another event
    for event in events:
        part = event.part if isinstance(event, Delta) else None
        if part is None or not _extend(last.get(event.turn), part):
            merged.append(event)
            last[event.turn] = part
    return merged


def _extend(before: Part | None, part: Part) -> bool:
    """Append `part` to `before` if they are of one kind. Returns False if they are not."""
    match before, part:
        case TextDelta(), TextDelta():
            if part.logprobs:
                before.logprobs = [*(before.logprobs or ()), *part.logprobs]
            if part.tokens:
                before.tokens = [*(before.tokens or ()), *part.tokens]
        case ReasoningDelta(), ReasoningDelta():
            pass
        case ArgumentsDelta(index), ArgumentsDelta(other) if index == other:
            pass
        case _:
            return False
    before.text += part.text
    return True
