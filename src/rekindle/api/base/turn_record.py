"""Adds the figures of turns to the record of their request, and logs how long prompts progress."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from rekindle.errors import ServerError
from rekindle.http.logs import PROGRESS_LOG, current_id
from rekindle.http.records import RequestRecord, open_record
from rekindle.protocol.events import (
    Cancelled,
    Embedded,
    Event,
    Failed,
    Finished,
    Prefill,
    Ranked,
    Started,
)

log = logging.getLogger(PROGRESS_LOG)

LOG_EVERY_S = 5.0


class PrefillLog:
    """Logs the prefill progress of each turn every five seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._request_id = current_id()  # events arrive outside of the request's context
        self._last_s: dict[int, float] = {}  # by turn: its start, or its last line

    def record(self, event: Event) -> None:
        if isinstance(event, Started):
            self._last_s[event.turn] = self._clock()
        elif isinstance(event, Prefill):
            now = self._clock()
            if now - self._last_s.setdefault(event.turn, now) < LOG_EVERY_S:
                return
            self._last_s[event.turn] = now
            log.info(
                "turn %d: %d of %d prompt tokens read",
                event.turn,
                event.done_tokens,
                event.prompt_tokens,
                extra={"request_id": self._request_id},
            )


@dataclass(slots=True)
class _TurnFigures:
    """What is known about one turn. A turn that is cut off has no `Finished`."""

    prompt_tokens: int = 0
    reused_tokens: int = 0
    tier: str | None = None
    reason: str = ""
    parts: int = 0
    last_part_s: float = 0.0
    finished: Finished | None = None


class TurnRecorder:
    """Observes the turns of one request. Without a request, as in the Python API, it does nothing.

    `firsts` are the indices of the turns whose prompts count. Further choices have the same prompt.
    """

    def __init__(
        self,
        model: str,
        firsts: Collection[int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._firsts = firsts
        self._turns: dict[int, _TurnFigures] = {}
        self._open = open_record()
        self._record: RequestRecord | None = None
        if self._open is not None:
            self._record = self._open.record
            self._record.model = model
            self._open.begin_work()

    def add_part(self, index: int) -> None:
        """A part of a reply has arrived, which is usually one token."""
        record = self._record
        if record is None:
            return
        now_s = self._clock()
        turn = self._turns.get(index) or self._turns.setdefault(index, _TurnFigures())
        if turn.parts:
            record.add_gap(now_s - turn.last_part_s)
        elif record.first_token_at_s is None:
            record.first_token_at_s = now_s
        turn.parts += 1
        turn.last_part_s = now_s

    def add_event(self, index: int, event: Event) -> None:
        """Any other event of a turn."""
        if self._record is None:
            return
        turn = self._turns.setdefault(index, _TurnFigures())
        match event:
            case Started(_, prompt_tokens, reused_tokens, cache):
                turn.prompt_tokens, turn.reused_tokens = prompt_tokens, reused_tokens
                turn.tier = cache.tier if cache else None
            case Finished():
                turn.prompt_tokens, turn.reused_tokens = (
                    event.prompt_tokens,
                    event.cache.reused_tokens,
                )
                turn.tier, turn.reason = event.cache.tier, event.cache.reason
                turn.finished = event
            case Embedded() | Ranked():
                turn.prompt_tokens, turn.reused_tokens = event.prompt_tokens, event.reused_tokens
            case Failed(_, error):
                self._record.error = self._record.error or error.code or "error"
            case Cancelled():
                self._record.error = self._record.error or "cancelled"

    def refused(self, error: ServerError) -> None:
        """The turns could not be started."""
        if self._record is not None:
            self._record.error = error.code
        self._end()

    def close(self) -> None:
        """Write the figures into the record, which is complete when the response has ended, too."""
        record = self._record
        if record is None:
            return
        for index, turn in sorted(self._turns.items()):
            record.turns += 1
            if index in self._firsts:
                record.prompt_tokens += turn.prompt_tokens
                record.reused_tokens += turn.reused_tokens
                record.tier = record.tier or turn.tier
                record.reuse = record.reuse or turn.reason
            record.output_tokens += turn.finished.completion_tokens if turn.finished else turn.parts
            if turn.finished is not None:
                _add_end(record, turn.finished)
        self._end()

    def _end(self) -> None:
        opened, self._open, self._record = self._open, None, None
        if opened is not None:
            opened.end()


def _add_end(record: RequestRecord, turn: Finished) -> None:
    record.finish = record.finish or turn.reason
    record.decode_s += turn.completion_s
    if turn.first_token_at_s is not None:  # sampled, which is before the first part arrives
        known_s = record.first_token_at_s
        record.first_token_at_s = min(known_s or turn.first_token_at_s, turn.first_token_at_s)
    if turn.stages is not None:
        record.queue_s = max(record.queue_s, turn.stages.queue)
        record.prefill_s = max(record.prefill_s, turn.stages.compute)
