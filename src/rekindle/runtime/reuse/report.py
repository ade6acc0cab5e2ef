"""Decides whether a request was a hit, a partial hit or a miss, and why.

Turns, `validate` and `explain` use the same function, so they give the same answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rekindle.chat.describe import first_difference
from rekindle.chat.escaping import unescape
from rekindle.chat.message_hashes import ConversationHashes
from rekindle.chat.prompt import MessageSpan, Prompt
from rekindle.kvcache.entries.entry import Entry
from rekindle.protocol.events import Divergence, Reason, Status


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """How a request relates to the entry that it names."""

    common_tokens: int
    covers: bool  # the prompt starts with the whole entry
    reason: Reason  # the first difference, or FULL_MATCH
    changed: str | None = None  # "system", "tools" or "turn N"
    diverged_at: Divergence | None = None
    was_computed: bool = True  # False: the entry was indexed, but its state never computed


@dataclass(frozen=True, slots=True, kw_only=True)
class ReuseInputs:
    """The facts that `classify` depends on."""

    prompt_tokens: int
    first_message_tokens: int  # position of the end of the first message; 0 if unknown
    reused_tokens: int  # tokens that were reused, or would be
    matched_tokens: int  # tokens of equal state that was found, whether usable or not
    diverged: bool  # the matching state continues with other tokens than the request
    changed: Reason  # names the part of the request in which the match ends
    reuse: bool = True  # the request allows reuse
    exact: bool = False
    can_truncate: bool = True  # False: turns resume at checkpoints only
    problem: Reason | None = None  # the key is unknown, or stored state could not be used
    named: Comparison | None = None  # None: the request names no entry

    @property
    def lacks_checkpoint(self) -> bool:
        """Equal state exists, but there is no checkpoint to resume it from."""
        lost = self.matched_tokens - self.reused_tokens
        return not self.can_truncate and not self.diverged and lost > 1


class ReuseOutcome(NamedTuple):
    status: Status
    reason: Reason


def classify(inputs: ReuseInputs) -> ReuseOutcome:
    """Return the status and its reason.

    Reusing less than the first whole message is a miss, because every prompt of a model shares a
    few tokens of the chat template.
    """
    if inputs.problem in (Reason.CACHE_KEY_NOT_FOUND, Reason.EXPIRED):
        return ReuseOutcome("miss", inputs.problem)
    named = inputs.named
    status, reason = _classify_named(inputs, named) if named else _classify_unnamed(inputs)
    # The last prompt token is never reused, even if it is the end of the only message.
    whole = min(max(inputs.first_message_tokens, 1), inputs.prompt_tokens - 1)
    if inputs.reused_tokens >= whole:
        return ReuseOutcome(status, reason)
    return ReuseOutcome("miss", Reason.NOT_CACHED if reason is Reason.FULL_MATCH else reason)


def _classify_named(inputs: ReuseInputs, entry: Comparison) -> ReuseOutcome:
    """A request that names an entry is a hit if it reuses the whole entry."""
    wanted = min(entry.common_tokens, inputs.prompt_tokens - 1)
    # The last token of a reply was sampled, so it has no KV state yet.
    is_short = wanted - inputs.reused_tokens > 1
    if entry.covers and not is_short:
        return ReuseOutcome("hit", Reason.FULL_MATCH)
    return ReuseOutcome("partial_hit", inputs.problem or _why_short(inputs, entry))


def _why_short(inputs: ReuseInputs, entry: Comparison) -> Reason:
    if not entry.covers:
        return entry.reason
    if inputs.exact:
        return Reason.EXACT_BOUNDARY
    has_equal_state = inputs.matched_tokens >= entry.common_tokens - 1
    if inputs.lacks_checkpoint or (has_equal_state and not inputs.can_truncate):
        return Reason.CHECKPOINT_BOUNDARY
    return Reason.EVICTED if entry.was_computed else Reason.NOT_CACHED


def _classify_unnamed(inputs: ReuseInputs) -> ReuseOutcome:
    """A request without a name is a hit if it reuses everything that was found."""
    if not inputs.reuse:
        return ReuseOutcome("miss", Reason.OPTED_OUT)
    if inputs.problem is not None:
        return ReuseOutcome("partial_hit", inputs.problem)
    if inputs.lacks_checkpoint:
        return ReuseOutcome("partial_hit", Reason.CHECKPOINT_BOUNDARY)
    if not inputs.reused_tokens and not inputs.matched_tokens:
        return ReuseOutcome("miss", Reason.NOT_CACHED)
    if not inputs.reused_tokens:
        return ReuseOutcome("miss", Reason.EXACT_BOUNDARY if inputs.exact else inputs.changed)
    if not inputs.diverged:
        return ReuseOutcome("hit", Reason.FULL_MATCH)
    return ReuseOutcome("partial_hit", inputs.changed)


def compare(entry: Entry, prompt: Prompt, hashes: ConversationHashes | None) -> Comparison:
    """Compare a request with the entry that it names."""
    common = entry.tokens.common_prefix(prompt.tokens)
    covers, changed = common == len(entry.tokens), None
    if covers:
        reason = Reason.FULL_MATCH
    elif common == len(prompt.tokens):
        reason = Reason.REQUEST_SHORTER
    elif hashes and (changed := hashes.first_change(entry.segments)):
        is_turn = changed.startswith("turn")
        reason = Reason.TURN_CHANGED if is_turn else Reason(f"{changed}_changed")
    else:
        reason = changed_at(prompt, common)
    return Comparison(
        common_tokens=common,
        covers=covers,
        reason=reason,
        changed=changed,
        diverged_at=None if covers else _divergence(entry, prompt, common),
        was_computed=entry.was_computed,
    )


def changed_at(prompt: Prompt, token: int) -> Reason:
    """Return the reason for a difference at this token: the part of the request that holds it."""
    for span in prompt.spans:
        if token < span.end:
            return Reason.SYSTEM_CHANGED if span.role == "system" else Reason.TURN_CHANGED
    return Reason.TURN_CHANGED if prompt.spans else Reason.PREFIX_CHANGED


def _divergence(entry: Entry, prompt: Prompt, token: int) -> Divergence | None:
    if not entry.text or not prompt.escaped:
        return None
    at = next((span for span in prompt.spans if token < span.end), None)
    stored, sent = first_difference(entry.text, prompt.escaped)
    return Divergence(at.index if at else None, at.role if at else None, stored, sent)


def first_message_tokens(prompt: Prompt, tools: Sequence[Any] | None) -> int:
    """Position of the end of the first message, or of the tools if they precede all messages.

    Returns 0 if the position is unknown.
    """
    if not prompt.spans:
        return 0
    first = prompt.spans[0]
    if first.index > 0 and prompt.known_tokens:
        return 0  # the first messages are part of a recalled prefix, which has no spans
    if tools and _shows_tools_before(first, tools, prompt):
        return first.start
    return first.end


def _shows_tools_before(first: MessageSpan, tools: Sequence[Any], prompt: Prompt) -> bool:
    before = unescape(prompt.escaped)[: first.start_byte]
    return all(tool["function"]["name"].encode() in before for tool in tools)
