"""Log lines about long prefills."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from rekindle.protocol.events import Event, Prefill, Started

log = logging.getLogger("rekindle.turn")

LINE_EVERY_S = 5.0


class PrefillLog:
    """Logs about every five seconds how far each prompt has come."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last_s: dict[int, float] = {}  # by turn: its start, or its last line

    def record(self, event: Event) -> None:
        match event:
            case Started():
                self._last_s[event.turn] = self._clock()
            case Prefill():
                self._log(event)

    def _log(self, event: Prefill) -> None:
        now = self._clock()
        if now - self._last_s.setdefault(event.turn, now) >= LINE_EVERY_S:
            self._last_s[event.turn] = now
            log.info(
                "turn %d: %d of %d prompt tokens read",
                event.turn,
                event.done_tokens,
                event.prompt_tokens,
            )
