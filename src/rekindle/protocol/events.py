"""What a turn tells its client, from arrival to exactly one terminal event.

They cross the socket between runtime and front, so each is a msgspec structure.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

FinishReason = Literal["stop", "length", "tool_calls"]


class TokenLog(Struct, array_like=True):
    """One sampled token with its log probability and the best alternatives."""

    piece: bytes
    logprob: float
    top: list[tuple[bytes, float]]


class Divergence(Struct):
    """Where a request leaves the state it was compared with, in words of both sides."""

    message: int | None  # of the request; None where messages cannot be told apart
    role: str | None
    stored: str  # the first words that differ, as the stored state has them
    sent: str  # and as the request has them


Status = Literal["hit", "partial_hit", "miss"]


class CacheReport(Struct):
    """What was really reused, and why not more. `reused_tokens` were not computed."""

    status: Status
    reason: str
    reused_tokens: int
    cached_tokens: int  # tokens of this turn that are now kept for a later one
    tier: str | None  # the slowest the reused state came from: "device", "ram", "disk", or none
    cache_key: str | None = None  # of the entry that a name in the request stands for
    new_cache_key: str | None = None  # of this turn's own entry, when it was asked for
    diverged_at: Divergence | None = None
    normalised: list[str] = []  # what was changed in the request so that more of it matched


class Started(Struct, tag=True):
    """The prompt is tokenised and what can be reused is in place; computing begins."""

    turn: int
    prompt_tokens: int
    reused_tokens: int


class Prefill(Struct, tag=True):
    """Progress through the prompt, reused tokens included."""

    turn: int
    done_tokens: int
    prompt_tokens: int


class Text(Struct, tag=True):
    """Text that is final: whole characters, no part of a stop string."""

    turn: int
    text: str
    logs: list[TokenLog] | None = None


class Reasoning(Struct, tag=True):
    """Text that the model wrote for itself."""

    turn: int
    text: str


class CallBegun(Struct, tag=True):
    """The model calls a function; the arguments follow. `index` counts the reply's calls."""

    turn: int
    index: int
    id: str
    name: str


class CallArguments(Struct, tag=True):
    """The next piece of a call's arguments, which are JSON."""

    turn: int
    index: int
    text: str


class Finished(Struct, tag=True):
    turn: int
    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    prompt_eval_s: float
    cache: CacheReport
    message_id: str | None = None  # by which the reply can be named later, when asked for
    reasoning_tokens: int = 0  # of the completion's, those the model wrote for itself


class Failed(Struct, tag=True):
    turn: int
    status: int
    kind: str
    code: str | None
    message: str
    param: str | None


class Cancelled(Struct, tag=True):
    turn: int


Event = (
    Started | Prefill | Text | Reasoning | CallBegun | CallArguments | Finished | Failed | Cancelled
)
TERMINAL = (Finished, Failed, Cancelled)
