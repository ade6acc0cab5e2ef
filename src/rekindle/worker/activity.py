"""Records what the turns of one model do: what runs, how the last ones ended, and what reuse saved.

The front sees every event of a turn, so nothing here asks the model's process.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rekindle.protocol.events import Cancelled, Event, Failed, Finished, Prefill, Started

MAX_ENDED_TURNS = 200
MAX_TENANTS = 1000  # whose figures are kept; the ones used longest ago are dropped
MAX_DAYS = 31
MINUTES = 60  # of history for the share of reused tokens
# A prompt with fewer computed tokens does not show how fast prompts are computed.
MIN_COMPUTED_TOKENS = 32


@dataclass(slots=True)
class TurnWatch:
    """One turn that has not ended."""

    number: int
    tenant: bytes
    request_id: str | None
    submitted_s: float  # on the monotonic clock, like all times here
    started: Started | None = None
    first_part_s: float | None = None
    read_tokens: int = 0  # of the prompt, reused ones included
    parts: int = 0  # of the reply; nearly always one for each token

    @property
    def state(self) -> str:
        if self.started is None:
            return "waiting"
        return "decode" if self.parts else "prefill"

    def observe(self, event: Event) -> None:
        """Take an event that is not a part of the reply."""
        if isinstance(event, Started):
            self.started, self.read_tokens = event, event.reused_tokens
        elif isinstance(event, Prefill):
            self.read_tokens = event.done_tokens

    def shown(self, now_s: float) -> dict[str, Any]:
        started = self.started
        cache = started.cache if started else None
        decoding_s = now_s - self.first_part_s if self.first_part_s is not None else 0.0
        return {
            "turn": self.number,
            "request_id": self.request_id,
            "state": self.state,
            "age_s": round(now_s - self.submitted_s, 1),
            "prompt_tokens": started.prompt_tokens if started else None,
            "read_tokens": self.read_tokens,
            "reused_tokens": started.reused_tokens if started else None,
            "tier": cache.tier if cache else None,
            "output_tokens": self.parts,
            "tokens_per_s": round(self.parts / decoding_s, 1) if decoding_s > 0.2 else None,
        }


@dataclass(slots=True)
class EndedTurn:
    """How a turn ended, without its content."""

    tenant: bytes
    shown: dict[str, Any]


@dataclass(slots=True)
class Tally:
    """What the turns of one tenant, or of all, have added up to."""

    #: Minute, prompt tokens, reused tokens, output tokens; the newest last.
    minutes: deque[list[int]] = field(default_factory=lambda: deque(maxlen=MINUTES))
    #: By date: reused tokens, and the seconds that computing them would have taken.
    days: OrderedDict[str, list[float]] = field(default_factory=OrderedDict)
    saved_tokens: int = 0
    saved_s: float = 0.0

    def add(self, minute: int, day: str, turn: Finished, saved_s: float) -> None:
        reused = turn.cache.reused_tokens
        if not self.minutes or self.minutes[-1][0] != minute:
            self.minutes.append([minute, 0, 0, 0])
        for place, tokens in enumerate((turn.prompt_tokens, reused, turn.completion_tokens), 1):
            self.minutes[-1][place] += tokens
        saved = self.days.setdefault(day, [0, 0.0])
        saved[0] += reused
        saved[1] += saved_s
        self.saved_tokens += reused
        self.saved_s += saved_s
        while len(self.days) > MAX_DAYS:
            self.days.popitem(last=False)


class Activity:
    """The running and ended turns of one model."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.clock = clock
        self._wall_clock = wall_clock
        self._running: dict[int, TurnWatch] = {}  # oldest first
        self._ended: deque[EndedTurn] = deque(maxlen=MAX_ENDED_TURNS)
        self._tallies: OrderedDict[bytes | None, Tally] = OrderedDict()
        self.token_s: float | None = None  # measured time to compute a prompt token

    def begin(self, number: int, tenant: bytes, request_id: str | None) -> TurnWatch:
        watch = TurnWatch(number, tenant, request_id, self.clock())
        self._running[number] = watch
        return watch

    def end(self, watch: TurnWatch, event: Event | None) -> None:
        """Record the end of a turn. Without an event, its client has disconnected."""
        if self._running.pop(watch.number, None) is None:
            return
        shown = {
            "time": self._wall_clock(),
            "request_id": watch.request_id,
            "total_s": round(self.clock() - watch.submitted_s, 3),
            "output_tokens": watch.parts,
            "end": "cancelled",
        }
        match event:
            case Finished():
                shown |= self._finished(watch, event)
            case Failed(_, error):
                shown |= {"end": "failed", "error": error.code or error.kind}
            case None | Cancelled():
                pass
            case _:
                shown["end"] = "done"  # embeddings and scores
        self._ended.append(EndedTurn(watch.tenant, shown))

    def _finished(self, watch: TurnWatch, turn: Finished) -> dict[str, Any]:
        cache = turn.cache
        computed = turn.prompt_tokens - cache.reused_tokens
        if computed >= MIN_COMPUTED_TOKENS and turn.prompt_eval_s > 0:
            token_s = turn.prompt_eval_s / computed
            known = self.token_s
            self.token_s = token_s if known is None else known + 0.3 * (token_s - known)
        saved_s = cache.reused_tokens * (self.token_s or 0.0)
        now = self._wall_clock()
        day = time.strftime("%Y-%m-%d", time.localtime(now))
        for view in (watch.tenant, None):
            self._tally(view).add(int(now // 60), day, turn, saved_s)
        first_s = watch.first_part_s
        return {
            "prompt_tokens": turn.prompt_tokens,
            "reused_tokens": cache.reused_tokens,
            "tier": cache.tier,
            "status": cache.status,
            "reason": cache.reason,
            "output_tokens": turn.completion_tokens,
            "first_token_s": None if first_s is None else round(first_s - watch.submitted_s, 3),
            "tokens_per_s": _rate(turn),
            "end": turn.reason,
        }

    def _tally(self, view: bytes | None) -> Tally:
        tally = self._tallies.setdefault(view, Tally())
        self._tallies.move_to_end(view)
        if len(self._tallies) > MAX_TENANTS:
            oldest = next(iter(self._tallies))
            if oldest is not None:
                del self._tallies[oldest]
        return tally

    # -- what a tenant, or an admin (None), may see ------------------------------------------------

    def running(self, view: bytes | None) -> list[dict[str, Any]]:
        now_s = self.clock()
        seen = (each for each in self._running.values() if view in (None, each.tenant))
        return [each.shown(now_s) for each in seen]

    def ended(self, view: bytes | None, count: int) -> list[dict[str, Any]]:
        """The last turns, newest first."""
        seen = [each.shown for each in self._ended if view in (None, each.tenant)]
        return seen[: -count - 1 : -1]

    def tally(self, view: bytes | None) -> Tally:
        return self._tallies.get(view) or Tally()


def _rate(turn: Finished) -> float | None:
    """Tokens per second after the first token."""
    later = turn.completion_tokens - 1
    return round(later / turn.completion_s, 1) if later > 0 and turn.completion_s > 0 else None
