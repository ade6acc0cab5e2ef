"""Names in requests: which entry one stands for, what came of it, and what is remembered after.

A name proposes an entry; what is reused is decided by tokens, whoever proposed what.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rekindle.chat.content import Message
from rekindle.chat.diff import first_difference
from rekindle.chat.encode import Encoder, Prompt
from rekindle.chat.escaping import unmark
from rekindle.chat.fingerprint import fingerprint, previous
from rekindle.chat.message_hashes import Parts, Told, first_change, segments
from rekindle.errors import NoRoomForPins
from rekindle.kvcache.block import PrefixHandle, WriteBack
from rekindle.kvcache.entries import Draft, Entries, Entry, Name
from rekindle.kvcache.store import Store
from rekindle.protocol.events import CacheReport, Divergence, Finished, Reason, Status
from rekindle.protocol.requests import Names, WritePolicy
from rekindle.runtime.kv_manager import Outcome
from rekindle.runtime.replay import replies_after
from rekindle.runtime.turn import Turn
from rekindle.tokens import Tokens

SESSION, NUMBER, MESSAGE, PROMPT = (
    "session_id",
    "kv_cache_session_id",
    "message_id",
    "prompt_cache_key",
)
FINGERPRINT, AUTO_SESSION = "fingerprint", "auto_session"

Log = Callable[[str], None]
Tools = Sequence[Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A request beside the entry that it names."""

    common_tokens: int
    covers: bool  # the request goes on from the whole entry
    shorter: bool  # the entry goes on from the whole request
    reason: Reason
    changed: str | None
    diverged_at: Divergence | None


@dataclass(frozen=True, slots=True)
class Reached:
    """Where a turn has got to: what is remembered of it."""

    tokens: Sequence[int]
    text: bytes
    text_tokens: int  # that the text stands for
    end_tokens: int = 0  # up to the end of the reply, when they are all of it and no more


class Sessions:
    """Called by the engine's thread."""

    def __init__(
        self,
        entries: Entries,
        store: Store,
        encoder: Encoder,
        log: Log,
        *,
        policy: WritePolicy = "always",
        key_ttl_s: float | None = 1800.0,
        token_bytes: int = 0,
        checkpoint_bytes: int = 0,
    ) -> None:
        self._entries = entries
        self._store = store
        self._encoder = encoder
        self._log = log
        self._policy = policy
        self._key_ttl_s = key_ttl_s
        self._token_bytes = token_bytes
        self._checkpoint_bytes = checkpoint_bytes  # 0: state can be cut, so there are none
        self.counts: dict[bytes, Counter[Status]] = {}  # turns by what they found, by tenant
        self._last_auto: dict[bytes, int] = {}  # the last number a fingerprint was given

    # -- before a turn -------------------------------------------------------------------------

    def meet(self, turn: Turn) -> None:
        """Find the entry that the request names; raises NoRoomForPins."""
        turn.write_back = self._write_back(turn)
        if preparing := turn.ask.prepare:
            if preparing.pinned:
                self.check_pin(PrefixHandle(turn.namespace, turn.buffer.all()))
            return
        naming = turn.ask.names
        if naming is None or not turn.ask.reuse:
            return
        if naming.cache_key is not None:
            turn.named = self._entries.by_key(turn.namespace, naming.cache_key)
            if turn.named is None:
                turn.trouble = self._missing(turn.namespace, naming.cache_key)
        turn.named = turn.named or self._proposed(turn.namespace, naming)
        if naming.by_fingerprint and turn.ask.messages:
            self._meet_by_fingerprint(turn)
        if turn.named is not None:
            self._entries.touch(turn.named)

    def _missing(self, root: bytes, key: str) -> Reason:
        if not self._entries.has_expired(root, key):
            return Reason.CACHE_KEY_NOT_FOUND
        self._entries.collect(root)
        return Reason.EXPIRED

    def _proposed(self, root: bytes, naming: Names) -> Entry | None:
        """The entry of the first known name but the key."""
        found = (self._entries.by_name(root, name) for name in _proposals(naming))
        return next((entry for entry in found if entry is not None), None)

    def _write_back(self, turn: Turn) -> WriteBack:
        naming = turn.ask.names
        if naming is not None and naming.in_memory:
            return WriteBack.NEVER
        if self._policy == "always" or turn.ask.prepare is not None:
            return WriteBack.SOON
        if self._policy == "named":
            return WriteBack.SOON if naming is not None and _is_named(naming) else WriteBack.NEVER
        return WriteBack.LATE

    def check_pin(self, candidate: PrefixHandle) -> None:
        """Raise unless everything pinned, and this too, has room for good; of several tenants each
        may pin its share."""
        living = self._entries.of(None)
        pinned = [entry for entry in living if entry.pinned]
        tenants = {candidate.namespace, *(entry.namespace for entry in living)}
        limit = self._store.pin_limit_bytes
        for whose, most in (
            (pinned, limit),
            ([e for e in pinned if e.namespace == candidate.namespace], limit // len(tenants)),
        ):
            needed = self._store.lasting_bytes(
                [*whose, candidate], self._token_bytes, self._checkpoint_bytes
            )
            if needed > most or not self._entries.has_room:
                raise NoRoomForPins(
                    f"With this one, pinned entries would take {needed} of the {most} bytes they "
                    "may take. Unpin or delete another, or raise --disk-cache."
                )

    def _meet_by_fingerprint(self, turn: Turn) -> None:
        assert turn.ask.messages is not None
        before = previous(turn.ask.messages)
        found = self._entries.by_name(turn.namespace, (FINGERPRINT, fingerprint(before)))
        known = _auto_session(found) if before and found else None
        if found is not None and known is not None:
            turn.named, turn.session = found, known
            self._log(f"FingerprintManager: matched existing session {known}")
            return
        taken = (_auto_session(entry) for entry in self._entries.of(turn.namespace))
        numbers = [int(name.rpartition("_")[2]) for name in taken if name]
        numbers.append(self._last_auto.get(turn.namespace, -1))
        self._last_auto[turn.namespace] = max(numbers) + 1
        turn.session = f"auto_session_{max(numbers) + 1}"
        self._log(f"FingerprintManager: registered new session {turn.session}")

    # -- what came of it -----------------------------------------------------------------------

    def explain(self, turn: Turn, outcome: Outcome) -> CacheReport:
        """A truthful word on what was reused and why not more."""
        report = self._judge(turn, outcome)
        report.normalised = list(turn.normalised)
        if turn.ask.prepare is None:
            self.counts.setdefault(turn.namespace, Counter())[report.status] += 1
        return report

    def _judge(self, turn: Turn, outcome: Outcome) -> CacheReport:
        reused, tier = outcome.reused_tokens, outcome.tier
        if turn.trouble in (Reason.CACHE_KEY_NOT_FOUND, Reason.EXPIRED):
            return CacheReport("miss", turn.trouble, reused, 0, tier)
        if turn.named is not None:
            return self._judge_named(turn, turn.named, outcome)
        plan = outcome.plan
        if reused == 0:
            short = turn.trouble is None and self._falls_short(outcome)
            reason = Reason.CHECKPOINT_BOUNDARY if short else _why_nothing(turn, outcome)
            return CacheReport("miss", reason, 0, 0, None)
        if turn.trouble is not None:
            return CacheReport("partial_hit", turn.trouble, reused, 0, tier)
        if self._falls_short(outcome):
            return CacheReport("partial_hit", Reason.CHECKPOINT_BOUNDARY, reused, 0, tier)
        if not plan.diverged:
            return CacheReport("hit", Reason.FULL_MATCH, reused, 0, tier)
        return CacheReport(
            "partial_hit", _changed(turn.prompt, plan.matched_tokens), reused, 0, tier
        )

    def _falls_short(self, outcome: Outcome) -> bool:
        """Whether equal state is there, but none to go on from: it cannot be cut."""
        plan = outcome.plan
        lost = plan.matched_tokens - outcome.reused_tokens
        return bool(self._checkpoint_bytes) and not plan.diverged and lost > 1

    def _judge_named(self, turn: Turn, entry: Entry, outcome: Outcome) -> CacheReport:
        reused, tier = outcome.reused_tokens, outcome.tier
        told = self.compare(entry, turn.prompt, turn.ask.messages or [], turn.ask.tools)
        wanted = min(told.common_tokens, turn.prompt_tokens - 1)
        short = wanted - reused > 1  # the last token of a reply was sampled, not computed
        if not short and told.covers:
            return CacheReport("hit", Reason.FULL_MATCH, reused, 0, tier, cache_key=entry.key)
        reason = told.reason
        if turn.trouble is not None:
            reason = turn.trouble
        elif told.covers and turn.ask.exact:
            reason = Reason.EXACT_BOUNDARY
        elif told.covers and self._falls_short(outcome):
            reason = Reason.CHECKPOINT_BOUNDARY
        elif told.covers:
            reason = Reason.EVICTED if entry.was_computed else Reason.NOT_CACHED
        status: Status = "partial_hit" if reused else "miss"
        return CacheReport(
            status,
            reason,
            reused,
            0,
            tier,
            cache_key=entry.key,
            diverged_at=told.diverged_at,
        )

    def compare(
        self, entry: Entry, prompt: Prompt, messages: Sequence[Message], tools: Tools
    ) -> Comparison:
        """Where the request leaves the entry, if it does."""
        common = entry.tokens.common_prefix(Tokens.of(prompt.tokens))
        held, sent = len(entry.tokens), len(prompt.tokens)
        if common == held:
            return Comparison(
                common_tokens=common,
                covers=True,
                shorter=False,
                reason=Reason.FULL_MATCH,
                changed=None,
                diverged_at=None,
            )
        shorter = common == sent
        changed = (
            None if shorter else first_change(entry.segments, segments(messages, tools), messages)
        )
        return Comparison(
            common_tokens=common,
            covers=False,
            shorter=shorter,
            reason=Reason.REQUEST_SHORTER if shorter else _reason(changed, prompt, common),
            changed=changed,
            diverged_at=_divergence(entry, prompt, common),
        )

    # -- after a turn --------------------------------------------------------------------------

    def remember(self, turn: Turn, finished: Finished) -> None:
        """Name the head that this turn has reached."""
        naming = turn.ask.names or Names()
        if naming.wants_message_id:
            finished.message_id = f"msg_{secrets.token_hex(12)}"
        if not turn.ask.reuse or not finished.cache.cached_tokens:
            return
        entry = self._entries.remember(self._draft(turn, naming, finished))
        if entry is None:
            return
        if naming.return_cache_key or turn.ask.prepare is not None:
            finished.cache.new_cache_key = entry.key
        if turn.session is not None:
            self._log(
                f"FingerprintManager: extended session {turn.session} fingerprint with "
                "assistant response"
            )

    def _draft(self, turn: Turn, naming: Names, finished: Finished) -> Draft:
        reached = self._head(turn)
        tokens = turn.buffer.first(len(reached.tokens))
        replies, before = replies_after(
            self._entries, turn, reached.text, tokens, end_tokens=reached.end_tokens
        )
        preparing = turn.ask.prepare
        keyed = naming.return_cache_key or preparing is not None
        ttl_s = naming.ttl_s or (self._key_ttl_s if keyed else None)
        return Draft(
            namespace=turn.namespace,
            tokens=tokens,
            text=reached.text,
            text_tokens=reached.text_tokens,
            replies=replies,
            after=before,
            segments=_segments(turn),
            names=tuple(_new_names(turn, naming, finished)),
            ttl_s=preparing.ttl_s if preparing else ttl_s,
            keyed=keyed,
            pinned=preparing is not None and preparing.pinned,
            durable=turn.write_back > WriteBack.NEVER,
        )

    def _head(self, turn: Turn) -> Reached:
        prompt = turn.prompt
        if turn.ask.prepare is not None:
            return Reached(prompt.tokens, prompt.marked, len(prompt.tokens))
        reply, said = turn.tokens[turn.prompt_tokens :], turn.said if turn.is_plain else turn.raw
        head = self._encoder.head(prompt, reply, said)
        if head is None:
            return Reached(turn.tokens, b"", len(turn.tokens))
        count = len(head.tokens)
        if turn.is_plain:
            return Reached(head.tokens, head.marked, count, count)
        if turn.ask.stop:  # what that cut off is among the tokens
            shown = unmark(head.marked[len(prompt.marked) :])
            is_whole = shown.strip() == said.encode().strip()
            is_whole &= not turn.broke_off
            return Reached(head.tokens, head.marked, count, count if is_whole else 0)
        end = 0 if turn.broke_off else len(turn.tokens)
        return Reached(turn.tokens, head.marked, count, end)


def _proposals(naming: Names) -> Iterator[Name]:
    """The names a request was given, the surest first."""
    if naming.session_id is not None:
        yield SESSION, naming.session_id
    if naming.session_number is not None:
        yield NUMBER, str(naming.session_number)
    for message in naming.message_ids:
        yield MESSAGE, message
    if naming.prompt_cache_key is not None:
        yield PROMPT, naming.prompt_cache_key


def _new_names(turn: Turn, naming: Names, finished: Finished) -> Iterator[Name]:
    """What this turn's head is called from now on."""
    yield from (name for name in _proposals(naming) if name[0] != MESSAGE)
    if finished.message_id is not None:
        yield MESSAGE, finished.message_id
    if turn.session is not None:
        yield AUTO_SESSION, turn.session
        yield FINGERPRINT, fingerprint(_conversation(turn))


def _conversation(turn: Turn) -> list[Message]:
    """The request's messages and the reply."""
    messages: list[Message] = list(turn.ask.messages or [])
    if turn.ask.prepare is None and messages:
        messages.append(turn.message)
    return messages


def _segments(turn: Turn) -> Parts:
    messages = turn.ask.messages or []
    told = turn.told or Told(messages, turn.ask.tools)
    is_said = turn.ask.prepare is None and messages
    return told.after(turn.message) if is_said else told.segments


def _is_named(naming: Names) -> bool:
    asked = naming.cache_key is not None or naming.return_cache_key or naming.wants_message_id
    return asked or naming.by_fingerprint or any(True for _ in _proposals(naming))


def _auto_session(entry: Entry | None) -> str | None:
    names = entry.names if entry else ()
    return next((name for kind, name in names if kind == AUTO_SESSION), None)


def _why_nothing(turn: Turn, outcome: Outcome) -> Reason:
    if not turn.ask.reuse:
        return Reason.OPTED_OUT
    if turn.trouble is not None:
        return turn.trouble
    matched = outcome.plan.matched_tokens
    if turn.ask.exact and matched:
        return Reason.EXACT_BOUNDARY
    return _changed(turn.prompt, matched) if matched else Reason.NOT_CACHED


def _reason(changed: str | None, prompt: Prompt, common: int) -> Reason:
    """What segments and tokens together say has changed."""
    if changed is not None and changed.startswith("turn"):
        return Reason.TURN_CHANGED
    return Reason(f"{changed}_changed") if changed else _changed(prompt, common)


def _changed(prompt: Prompt, common: int) -> Reason:
    """Which part of the request is the first that differs."""
    for boundary in prompt.boundaries:
        if common < boundary.end:
            return Reason.SYSTEM_CHANGED if boundary.role == "system" else Reason.TURN_CHANGED
    return Reason.TURN_CHANGED if prompt.boundaries else Reason.PREFIX_CHANGED


def _divergence(entry: Entry, prompt: Prompt, common: int) -> Divergence | None:
    if not entry.text or not prompt.marked:
        return None
    at = next((each for each in prompt.boundaries if common < each.end), None)
    stored, sent = first_difference(entry.text, prompt.marked)
    return Divergence(at.index if at else None, at.role if at else None, stored, sent)
