"""Decides whether a request was a hit, a partial hit or a miss, and why.

The status is about tokens: how much of the state that could be reused was reused. The reason is
about names and changes. Turns, `validate` and `explain` use the same function, so they give the
same answer.
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
from rekindle.tokens import Tokenizer

NAME_PROBLEMS = (Reason.CACHE_KEY_NOT_FOUND, Reason.EXPIRED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """How a request relates to a stored conversation."""

    common_tokens: int
    covers: bool  # the prompt starts with the whole conversation
    reason: Reason  # the first difference, or FULL_MATCH
    diverges: bool = False  # the prompt and the conversation continue differently
    changed: str | None = None  # "system", "tools" or "turn N"
    was_computed: bool = True  # False: the entry was indexed, but its state never computed


@dataclass(frozen=True, slots=True, kw_only=True)
class ReuseInputs:
    """The facts that `classify` depends on."""

    prompt_tokens: int
    opening_tokens: int  # tokens of the template before the first content; 0 if unknown
    reused_tokens: int  # tokens that were reused, or would be
    matched_tokens: int  # tokens of equal state that was found, whether usable or not
    diverged: bool  # the matching state continues with other tokens than the request
    changed: Reason  # names the part of the request in which the match ends
    reuse: bool = True  # the request allows reuse
    exact: bool = False
    can_truncate: bool = True  # False: turns resume at checkpoints only
    problem: Reason | None = None  # the key is unknown, or stored state could not be used
    named: Comparison | None = None  # with the entry that the request names
    nearest: Comparison | None = None  # without a name, with the most similar conversation

    @property
    def compared(self) -> Comparison | None:
        """The comparison that explains the outcome. None without a name if the state that was found
        matches more tokens than the most similar conversation."""
        if self.named is None and self.nearest is not None:
            is_source = self.nearest.common_tokens >= self.matched_tokens
            return self.nearest if is_source else None
        return self.named

    @property
    def diverges(self) -> bool:
        """Whether the state that matches most continues differently than the request."""
        compared = self.compared
        if compared is None:
            return self.diverged
        is_source = not compared.diverges or compared.common_tokens >= self.matched_tokens
        return compared.diverges if is_source else self.diverged

    @property
    def is_short(self) -> bool:
        """Whether state that the request could reuse was not reused."""
        compared = self.compared
        if compared is None and self.problem not in (None, *NAME_PROBLEMS):
            return True
        wanted = self.matched_tokens
        if compared is not None:
            common = compared.common_tokens
            wanted = common if compared.covers else max(common, wanted)
        # The last prompt token is always computed. The last token of a reply was sampled, so it has
        # no KV state yet.
        return min(wanted, self.prompt_tokens - 1) - self.reused_tokens > 1


class ReuseOutcome(NamedTuple):
    status: Status
    reason: Reason


def classify(inputs: ReuseInputs) -> ReuseOutcome:
    """Return the status and the reason.

    Every prompt of a model begins with the same tokens of the chat template, so reusing only these
    is a miss.
    """
    if not inputs.reuse:
        return ReuseOutcome("miss", Reason.OPTED_OUT)
    reason = _reason(inputs)
    if inputs.reused_tokens <= inputs.opening_tokens:
        is_equal = reason in (Reason.FULL_MATCH, Reason.REQUEST_SHORTER)
        return ReuseOutcome("miss", Reason.NOT_CACHED if is_equal else reason)
    if inputs.is_short or inputs.diverges:
        return ReuseOutcome("partial_hit", reason)
    return ReuseOutcome("hit", reason)


def _reason(inputs: ReuseInputs) -> Reason:
    """A wrong key comes first, then state that failed, then a change, then state that is gone."""
    problem, compared = inputs.problem, inputs.compared
    if problem is not None and (problem in NAME_PROBLEMS or inputs.is_short):
        return problem
    if compared is not None and compared.diverges:
        return compared.reason
    if inputs.diverges:
        return inputs.changed
    if inputs.is_short:
        return _why_short(inputs)
    return compared.reason if compared is not None else Reason.FULL_MATCH


def _why_short(inputs: ReuseInputs) -> Reason:
    """Why the request did not reuse state of tokens that are equal."""
    compared = inputs.compared
    if inputs.exact:
        return Reason.EXACT_BOUNDARY
    has_equal_state = compared is None or inputs.matched_tokens >= compared.common_tokens - 1
    if has_equal_state and not inputs.can_truncate:
        return Reason.CHECKPOINT_BOUNDARY
    return Reason.EVICTED if compared is None or compared.was_computed else Reason.NOT_CACHED


def compare(entry: Entry, prompt: Prompt, hashes: ConversationHashes | None) -> Comparison:
    common = entry.tokens.common_prefix(prompt.tokens)
    covers, is_prefix = common == len(entry.tokens), common == len(prompt.tokens)
    changed = None
    if covers:
        reason = Reason.FULL_MATCH
    elif is_prefix:
        reason = Reason.REQUEST_SHORTER if _has_later_turns(entry, hashes) else Reason.FULL_MATCH
    elif hashes and entry.segments and (changed := hashes.first_change(entry.segments)):
        is_turn = changed.startswith("turn")
        reason = Reason.TURN_CHANGED if is_turn else Reason(f"{changed}_changed")
    else:
        reason = changed_at(prompt, common)
    return Comparison(
        common_tokens=common,
        covers=covers,
        reason=reason,
        diverges=not covers and not is_prefix,
        changed=changed,
        was_computed=entry.was_computed,
    )


def _has_later_turns(entry: Entry, hashes: ConversationHashes | None) -> bool:
    """Whether an entry that starts with the whole request has more than the reply to it. Unknown
    for a prompt without messages, which counts as no."""
    if hashes is None:
        return False
    stored, sent = (
        sum(kind == "turn" for kind, _ in segments)
        for segments in (entry.segments, hashes.segments)
    )
    return stored > sent


def changed_at(prompt: Prompt, token: int) -> Reason:
    """Return the reason for a difference at this token: the part of the request that holds it."""
    for span in prompt.spans:
        if token < span.end:
            return Reason.SYSTEM_CHANGED if span.role == "system" else Reason.TURN_CHANGED
    return Reason.TURN_CHANGED if prompt.spans else Reason.PREFIX_CHANGED


def divergence(entry: Entry, prompt: Prompt, compared: Comparison) -> Divergence | None:
    """Quote the first difference. None if there is none, or if a text is unknown."""
    if not compared.diverges or not entry.text or not prompt.escaped:
        return None
    at = next((span for span in prompt.spans if compared.common_tokens < span.end), None)
    stored, sent = first_difference(entry.text, prompt.escaped)
    return Divergence(at.index if at else None, at.role if at else None, stored, sent)


def opening_tokens(prompt: Prompt, tools: Sequence[Any] | None, tokenizer: Tokenizer) -> int:
    """Number of template tokens before the first content, which is a message or a tool.

    Returns 0 if the number is unknown, and for a prompt without messages.
    """
    if not prompt.spans:
        return 0
    first = prompt.spans[0]
    if first.index > 0 and prompt.known_tokens:
        return 0  # the first messages are part of a recalled prefix, which has no spans
    at_byte = _first_tool(first, tools, prompt) if tools else None
    if at_byte is None:
        return first.start
    count = seen_bytes = 0
    for token in prompt.tokens[: first.start]:
        seen_bytes += len(tokenizer.piece(token, special=True))
        if seen_bytes > at_byte:
            break
        count += 1
    return count


def _first_tool(first: MessageSpan, tools: Sequence[Any], prompt: Prompt) -> int | None:
    """The byte at which the first tool is named, if tools are shown before all messages."""
    before = unescape(prompt.escaped)[: first.start_byte]
    found = [before.find(tool["function"]["name"].encode()) for tool in tools]
    return min((at for at in found if at >= 0), default=None)
