"""Records what happened in one request, for its log line, the metrics and its trace.

The middleware makes a record for every request, also for one that it refuses. The dialects add the
figures of the turns that the request runs. The observers get each record once: when the response
has ended, and all turns of the request too.
"""

from __future__ import annotations

import contextlib
import re
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Scope

RECORD = "rekindle.record"  # the record's key in the request's scope
#: Upper bounds of the histogram of the seconds between two parts of a reply.
GAP_BOUNDS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3,
    0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
CLIENT_GONE = "client_gone"  # the error of a request whose client left before the end
_WORD = re.compile(r"[a-z][a-z._-]{0,23}|v\d")  # a part of a path that cannot be a key or an id


@dataclass(slots=True)
class RequestRecord:
    """The figures of one request. Times are on the monotonic clock, from its headers on."""

    request_id: str
    method: str
    endpoint: str  # the route, or the words of a path that has none
    is_routed: bool = False  # a refused request may never reach its route
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    started_s: float = field(default_factory=time.monotonic)
    started_at: float = field(default_factory=time.time)  # wall clock, in seconds
    status: int = 0  # 0: nothing was answered
    tenant: str = ""
    model: str = ""
    error: str | None = None  # the code of the error in the response or in its stream
    turns: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    tier: str | None = None  # the slowest tier that held reused state
    reuse: str = ""  # why the prompt did not reuse more of the stored state
    output_tokens: int = 0
    first_token_at_s: float | None = None
    decode_s: float = 0.0  # from the first token to the last, added up over the turns
    queue_s: float = 0.0
    prefill_s: float = 0.0
    finish: str = ""  # why the first turn ended
    total_s: float = 0.0  # until the response and all turns had ended
    gaps: list[int] = field(default_factory=lambda: [0] * (len(GAP_BOUNDS_S) + 1), repr=False)
    gaps_s: float = 0.0

    @property
    def first_token_s(self) -> float | None:
        """Seconds until the first token, or None if there was none."""
        at_s = self.first_token_at_s
        return None if at_s is None else max(at_s - self.started_s, 0.0)

    @property
    def tokens_per_s(self) -> float | None:
        """The decode speed of each turn. None without a second token."""
        later = self.output_tokens - max(self.turns, 1)
        return later / self.decode_s if later > 0 and self.decode_s > 0 else None

    def add_gap(self, gap_s: float) -> None:
        """Count the time between two parts of a reply. Runs for every token."""
        self.gaps[bisect_left(GAP_BOUNDS_S, gap_s)] += 1
        self.gaps_s += gap_s

    def fields(self) -> dict[str, Any]:
        """The figures for a structured log. It leaves out what the request does not have."""
        found: dict[str, Any] = {
            "tenant": self.tenant,
            "model": self.model,
            "method": self.method,
            "endpoint": self.endpoint,
            "status": self.status,
            "error": self.error,
            "total_s": round(self.total_s, 4),
        }
        if self.turns:
            found |= {
                "prompt_tokens": self.prompt_tokens,
                "reused_tokens": self.reused_tokens,
                "tier": self.tier,
                "reuse_reason": self.reuse,
                "output_tokens": self.output_tokens,
                "first_token_s": _rounded(self.first_token_s),
                "tokens_per_s": _rounded(self.tokens_per_s),
                "finish_reason": self.finish,
            }
        return {name: value for name, value in found.items() if value not in (None, "")}

    def line(self) -> str:
        """The figures as one sentence for a text log."""
        parts = [f"{self.error}"] if self.error else []
        if self.turns:
            source = f" from {self.tier}" if self.tier else ""
            why = f", {self.reuse}" if self.reuse not in ("", "full_match") else ""
            parts.append(f"prompt {self.prompt_tokens} ({self.reused_tokens} reused{source}{why})")
            parts.append(f"output {self.output_tokens}")
        if self.first_token_s is not None:
            parts.append(f"first token {self.first_token_s:.2f} s")
        parts.append(f"total {self.total_s:.{2 if self.turns else 3}f} s")
        if self.tokens_per_s is not None:
            parts.append(f"{self.tokens_per_s:.0f} tok/s")
        if self.finish:
            parts.append(f"stop={self.finish}")
        if self.tenant:
            parts.append(f"tenant={self.tenant}")
        model = f"{self.model} " if self.model else ""
        return f"{model}{self.method} {self.endpoint} {self.status}: {', '.join(parts)}"


def _rounded(number: float | None) -> float | None:
    return None if number is None else round(number, 4)


Observer = Callable[[RequestRecord], None]


class OpenRecord:
    """A record until its request has ended, which is when the response and all work have."""

    def __init__(self, record: RequestRecord, observers: Sequence[Observer]) -> None:
        self.record = record
        self._observers = observers
        self._open = 1  # the response, and each group of turns

    def begin_work(self) -> None:
        """A group of turns begins. It may outlive the response."""
        self._open += 1

    def end(self) -> None:
        """The response, or a group of turns, has ended. The last one completes the record."""
        self._open -= 1
        if self._open == 0:
            self.record.total_s = time.monotonic() - self.record.started_s
            for observe in self._observers:
                observe(self.record)


_open: ContextVar[OpenRecord | None] = ContextVar("open_record", default=None)


def open_record() -> OpenRecord | None:
    """The record of the current request. None outside of a request."""
    return _open.get()


@contextlib.contextmanager
def recorded(record: RequestRecord, observers: Sequence[Observer]) -> Iterator[RequestRecord]:
    """Record a request from here on. Its response has ended when the context ends."""
    opened = OpenRecord(record, observers)
    token = _open.set(opened)
    try:
        yield record
    finally:
        _open.reset(token)
        opened.end()


def endpoint_of(scope: Scope) -> str:
    """The route of a request: its path may have a cache key or a session id in it.

    A path without a route keeps its words, so that an operator sees what a client tried.
    """
    if (route := scope.get("route")) is not None:
        return str(getattr(route, "path_format", route.path))  # without the types of parameters
    parts = scope["path"][:256].split("/")[:8]
    return "/".join(part if not part or _WORD.fullmatch(part) else "*" for part in parts)


def note_error(scope: Scope, code: str | None) -> None:
    """Note the error that a response reports. The first one counts."""
    record: RequestRecord | None = scope.get(RECORD)
    if record is not None and record.error is None:
        record.error = code or "error"
