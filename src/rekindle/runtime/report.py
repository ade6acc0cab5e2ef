"""Hit, partial hit or miss, and why: one judgement for turns, `validate` and `explain` alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from rekindle.protocol.events import Divergence, Reason, Status

NO_NAME = (Reason.CACHE_KEY_NOT_FOUND, Reason.EXPIRED)  # the key stands for nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A request beside the entry that it names."""

    common_tokens: int
    covers: bool  # the request goes on from the whole entry
    reason: Reason  # where it does not, what differs
    changed: str | None = None  # "system", "tools" or "turn N"
    diverged_at: Divergence | None = None
    was_computed: bool = True  # the entry's state existed at some time


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """All that bears on the judgement of one request."""

    prompt_tokens: int
    first_message_tokens: int  # up to the end of its first message; 0: it has no messages
    reused_tokens: int  # that were, or would be, reused
    matched_tokens: int  # of equal state that was found, usable or not
    diverged: bool  # what was found goes on differently
    changed: Reason  # in which part of the request the found state ends
    reuse: bool = True  # the request allows it
    exact: bool = False
    can_truncate: bool = True  # else state is resumed at checkpoints alone
    problem: Reason | None = None  # the name is of no use, or stored state was damaged
    named: Comparison | None = None

    @property
    def falls_short(self) -> bool:
        """Equal state is there, but no checkpoint to resume it from."""
        lost = self.matched_tokens - self.reused_tokens
        return not self.can_truncate and not self.diverged and lost > 1


class Verdict(NamedTuple):
    status: Status
    reason: Reason


def judge(evidence: Evidence) -> Verdict:
    """A miss reuses not one whole message, however many tokens of the template agree."""
    if evidence.problem in NO_NAME:
        return Verdict("miss", evidence.problem)
    status, reason = _named(evidence, evidence.named) if evidence.named else _unnamed(evidence)
    if evidence.reused_tokens < max(evidence.first_message_tokens, 1):
        status = "miss"
    return Verdict(status, reason)


def _named(evidence: Evidence, entry: Comparison) -> Verdict:
    """Of a request that names an entry: all of the entry is a hit."""
    wanted = min(entry.common_tokens, evidence.prompt_tokens - 1)
    is_short = wanted - evidence.reused_tokens > 1  # a reply's last token is sampled, not computed
    if entry.covers and not is_short:
        return Verdict("hit", Reason.FULL_MATCH)
    return Verdict("partial_hit", evidence.problem or _why_short(evidence, entry))


def _why_short(evidence: Evidence, entry: Comparison) -> Reason:
    if not entry.covers:
        return entry.reason
    if evidence.exact:
        return Reason.EXACT_BOUNDARY
    if evidence.falls_short:
        return Reason.CHECKPOINT_BOUNDARY
    return Reason.EVICTED if entry.was_computed else Reason.NOT_CACHED


def _unnamed(evidence: Evidence) -> Verdict:
    """Of a request without a name: all that was found is a hit."""
    if not evidence.reuse:
        return Verdict("miss", Reason.OPTED_OUT)
    if evidence.problem is not None:
        return Verdict("partial_hit", evidence.problem)
    if evidence.falls_short:
        return Verdict("partial_hit", Reason.CHECKPOINT_BOUNDARY)
    if not evidence.reused_tokens:
        return Verdict("miss", _why_nothing(evidence))
    if not evidence.diverged:
        return Verdict("hit", Reason.FULL_MATCH)
    return Verdict("partial_hit", evidence.changed)


def _why_nothing(evidence: Evidence) -> Reason:
    if not evidence.matched_tokens:
        return Reason.NOT_CACHED
    return Reason.EXACT_BOUNDARY if evidence.exact else evidence.changed
