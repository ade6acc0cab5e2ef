"""Hit, partial hit or miss, and why: one judgement for turns, `validate` and `explain` alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rekindle.chat.describe import first_difference
from rekindle.chat.escaping import unescape
from rekindle.chat.message_hashes import ConversationHashes
from rekindle.chat.message_spans import MessageSpan
from rekindle.chat.prompt import Prompt
from rekindle.kvcache.entries.entries import Entry
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


def compare(entry: Entry, prompt: Prompt, hashes: ConversationHashes | None) -> Comparison:
    """Where a request differs from an entry, if it does."""
    common = entry.tokens.common_prefix(prompt.tokens)
    if common == len(entry.tokens):
        return Comparison(
            common_tokens=common,
            covers=True,
            reason=Reason.FULL_MATCH,
            was_computed=entry.was_computed,
        )
    is_shorter = common == len(prompt.tokens)
    changed = hashes.first_change(entry.segments) if hashes and not is_shorter else None
    return Comparison(
        common_tokens=common,
        covers=False,
        reason=Reason.REQUEST_SHORTER if is_shorter else _reason(changed, prompt, common),
        changed=changed,
        diverged_at=_divergence(entry, prompt, common),
        was_computed=entry.was_computed,
    )


def _reason(changed: str | None, prompt: Prompt, common: int) -> Reason:
    """What the hashes of messages and the tokens together say has changed."""
    if changed is None:
        return changed_at(prompt, common)
    return Reason.TURN_CHANGED if changed.startswith("turn") else Reason(f"{changed}_changed")


def changed_at(prompt: Prompt, tokens: int) -> Reason:
    """Which part of the request holds the token after so many."""
    for span in prompt.spans:
        if tokens < span.end:
            return Reason.SYSTEM_CHANGED if span.role == "system" else Reason.TURN_CHANGED
    return Reason.TURN_CHANGED if prompt.spans else Reason.PREFIX_CHANGED


def _divergence(entry: Entry, prompt: Prompt, common: int) -> Divergence | None:
    if not entry.text or not prompt.escaped:
        return None
    at = next((span for span in prompt.spans if common < span.end), None)
    stored, sent = first_difference(entry.text, prompt.escaped)
    return Divergence(at.index if at else None, at.role if at else None, stored, sent)


def first_message_tokens(prompt: Prompt, tools: Sequence[Any] | None) -> int:
    """The tokens up to the end of the first message, or of tools that stand before all messages;
    0 where that is not known."""
    if not prompt.spans:
        return 0
    first = prompt.spans[0]
    if first.index > 0 and prompt.known_tokens:
        return 0  # the messages before it are in the tokens that were recalled
    if tools and _are_shown_before(first, tools, prompt):
        return first.start
    return first.end


def _are_shown_before(first: MessageSpan, tools: Sequence[Any], prompt: Prompt) -> bool:
    before = unescape(prompt.escaped)[: first.start_byte]
    return all(tool["function"]["name"].encode() in before for tool in tools)


class Verdict(NamedTuple):
    status: Status
    reason: Reason


def judge(evidence: Evidence) -> Verdict:
    """A miss reuses not one whole message, however many tokens of the template agree."""
    if evidence.problem in NO_NAME:
        return Verdict("miss", evidence.problem)
    status, reason = _named(evidence, evidence.named) if evidence.named else _unnamed(evidence)
    # The last token of a prompt is never reused, even where it is the end of the only message.
    whole = min(max(evidence.first_message_tokens, 1), evidence.prompt_tokens - 1)
    if evidence.reused_tokens >= whole:
        return Verdict(status, reason)
    return Verdict("miss", Reason.NOT_CACHED if reason is Reason.FULL_MATCH else reason)


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
    has_equal_state = evidence.matched_tokens >= entry.common_tokens - 1
    if evidence.falls_short or (has_equal_state and not evidence.can_truncate):
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
