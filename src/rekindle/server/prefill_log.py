"""Progress through a long prompt: told to clients that ask, and to the log when it lasts."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from rekindle.protocol.events import Event, Prefill, Started

log = logging.getLogger("rekindle.turn")

LINE_EVERY_S = 5.0


class PrefillLog:
    """A line about every five seconds for each prompt that is still being read."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: dict[int, float] = {}  # by turn: when it began, or was last told of

    def hear(self, event: Event) -> None:
        match event:
            case Started():
                self._last[event.turn] = self._clock()
            case Prefill():
                self._told(event)

    def _told(self, event: Prefill) -> None:
        now = self._clock()
        if now - self._last.setdefault(event.turn, now) >= LINE_EVERY_S:
            self._last[event.turn] = now
            log.info(
                "turn %d: %d of %d prompt tokens read",
                event.turn,
                event.done_tokens,
                event.prompt_tokens,
            )


def progress(event: Started | Prefill) -> dict[str, int]:
    done = event.reused_tokens if isinstance(event, Started) else event.done_tokens
    return {"done_tokens": done, "prompt_tokens": event.prompt_tokens}
