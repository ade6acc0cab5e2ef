"""Finds the entry that a request names, and stores the end of a turn under the request's names.

A name only proposes an entry. Comparing tokens decides what is reused.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rekindle.chat.encode import Encoder
from rekindle.chat.escaping import unescape
from rekindle.chat.message_hashes import EntryHashes
from rekindle.chat.messages import canonical
from rekindle.errors import NoRoomForPins
from rekindle.kvcache.block import PrefixHandle, WriteBack
from rekindle.kvcache.entries.entries import Entries
from rekindle.kvcache.entries.entry import Draft, Entry, Name, Reply, cost_bytes
from rekindle.kvcache.entries.index import EntryIndex
from rekindle.kvcache.store import Store
from rekindle.protocol.events import Finished, Reason
from rekindle.protocol.frames import LogLine
from rekindle.protocol.requests import GenerateRequest, Names
from rekindle.runtime.encode.chat import find_replies, still_valid
from rekindle.runtime.encode.request import EncodedRequest, Lookup
from rekindle.runtime.schedule.turn import Turn
from rekindle.runtime.storage.storage import Log, Storage
from rekindle.tokens import Tokens

# The kinds of session keys: (kind, key) names an entry of a tenant.
SESSION, NUMBER = "session_id", "kv_cache_session_id"
MESSAGE, PROMPT = "message_id", "prompt_cache_key"
FINGERPRINT, FINGERPRINT_SESSION = "fingerprint", "auto_session"
PROJECT = "project"
# Each of these names one conversation. Using it for another one replaces the first (decision 45).
OWN_KINDS = (SESSION, NUMBER, MESSAGE)


def session_keys(names: Names) -> Iterator[Name]:
    """The session keys in a request, the most specific kind first."""
    if names.session_id is not None:
        yield SESSION, names.session_id
    if names.session_number is not None:
        yield NUMBER, str(names.session_number)
    for message in names.message_ids:
        yield MESSAGE, message
    if names.prompt_cache_key is not None:
        yield PROMPT, names.prompt_cache_key


def _new_session_keys(
    names: Names, message_id: str | None, session: str | None, hashes: EntryHashes | None
) -> Iterator[Name]:
    """The session keys that lead to the conversation from now on."""
    yield from (name for name in session_keys(names) if name[0] != MESSAGE)
    if message_id is not None:
        yield MESSAGE, message_id
    if session is not None and hashes is not None:
        yield FINGERPRINT_SESSION, session
        yield FINGERPRINT, hashes.fingerprint


def _can_be_named(names: Names) -> bool:
    """Whether the client has, or will get, a name for this conversation."""
    keyed = names.cache_key or names.entry_key or names.return_cache_key
    asked = keyed or names.wants_message_id or names.message_id is not None
    return bool(asked or names.by_fingerprint or any(True for _ in session_keys(names)))


@dataclass(frozen=True, slots=True)
class KeyLookup:
    """Finds the entry that a cache key means. The name of a project serves as a cache key, too."""

    entries: Entries
    shared_namespace: bytes  # of prompts that the operator shares with all tenants

    def find(
        self,
        own: bytes,
        key: str,
        kinds: Sequence[str] = (PROJECT,),
        groups: Sequence[bytes] = (),
    ) -> Entry | None:
        """Look for the key, then for a name of these kinds, among the tenant's own entries, then
        among those that its groups share, and then among those that all tenants share."""
        for namespace in (own, *groups, self.shared_namespace):
            if entry := self.entries.by_key(namespace, key):
                return entry
            named = (self.entries.by_name(namespace, (kind, key)) for kind in kinds)
            if entry := next((each for each in named if each), None):
                return entry
        return None


class FingerprintSessions:
    """Gives conversations without a name a numbered session, found by hashing their messages."""

    def __init__(self, entries: Entries, log: Log) -> None:
        self._entries = entries
        self._log = log
        self._last: dict[bytes, int] = {}  # the last number given, by namespace

    def find(self, encoded: EncodedRequest, entry: Entry | None) -> tuple[Entry | None, str]:
        """Return the known session with its entry, or a new session with the given entry."""
        assert encoded.hashes is not None
        namespace, previous = encoded.namespace, encoded.hashes.previous_fingerprint
        found = self._entries.by_name(namespace, (FINGERPRINT, previous)) if previous else None
        session = _session_of(found)
        if found is not None and session is not None:
            self.info(encoded.request, f"matched existing session {session}")
            return found, session
        session = self._new_session(namespace)
        self.info(encoded.request, f"registered new session {session}")
        return entry, session

    def info(self, request: GenerateRequest, text: str) -> None:
        self._log(LogLine("info", f"FingerprintManager: {text}", request.request_id))

    def _new_session(self, namespace: bytes) -> str:
        last = self._last.get(namespace)
        if last is None:  # continue after the sessions of the previous runtime
            last = self._entries.index.highest_number(namespace, FINGERPRINT_SESSION)
        self._last[namespace] = last + 1
        return f"auto_session_{last + 1}"


def _session_of(entry: Entry | None) -> str | None:
    names = entry.names if entry else ()
    return next((name for kind, name in names if kind == FINGERPRINT_SESSION), None)


class Pins:
    """Checks that pinned entries fit on the last tier and in the memory for entries. Each tenant
    may pin an equal share of both."""

    def __init__(self, entries: Entries, store: Store) -> None:
        self._entries = entries
        self._conversations = store.conversations

    def check(self, candidate: PrefixHandle, cost_bytes: int) -> None:
        """Raise NoRoomForPins unless this entry fits together with everything already pinned. It
        takes `cost_bytes` of the memory for entries."""
        tier, tenant = self._conversations.last_tier, candidate.tenant
        pinned = self._entries.retention.pinned_blocks
        missing = pinned.missing_bytes(tier, candidate)
        limit, tenants = tier.budget.limit_bytes, self._entries.retention.tenants_with(tenant)
        own_limit = min(limit // tenants, self._entries.cache_limits.get(tenant, limit))
        for view, limit_bytes in ((None, limit), (tenant, own_limit)):
            needed = pinned.held_bytes(tier, view) + missing
            if needed > limit_bytes:
                raise NoRoomForPins(
                    f"With this entry, pinned entries would take {needed} bytes, but the limit is "
                    f"{limit_bytes}. Unpin or delete another, or raise --disk-cache."
                )
        if not self._entries.budget.can_pin(tenant, cost_bytes - self._pinned_bytes(candidate)):
            raise NoRoomForPins(
                f"Pinned entries may take {self._entries.budget.pin_limit_bytes(tenant)} bytes of "
                "memory for tokens, text and documents, which this entry would exceed. Unpin or "
                "delete another, or raise --ram-cache and --disk-cache."
            )

    def _pinned_bytes(self, candidate: PrefixHandle) -> int:
        """What an equal entry that is already pinned takes of the memory for pins."""
        equal = self._entries.index.by_tokens(candidate.namespace, candidate.tokens)
        return equal.cost_bytes if equal is not None and equal.pinned else 0

    def can_pin_temporarily(self, candidate: PrefixHandle, cost_bytes: int) -> bool:
        """Whether a pin with a time limit may be added.

        All temporary pins share half of the room for pins, in equal parts for each tenant.
        """
        tier, tenant = self._conversations.last_tier, candidate.tenant
        retention = self._entries.retention
        needed = retention.pinned_blocks.held_bytes(tier, tenant)
        needed += retention.pinned_blocks.missing_bytes(tier, candidate)
        limit_bytes = tier.budget.limit_bytes // (2 * retention.tenants_with(tenant))
        return needed <= limit_bytes and self._entries.budget.can_pin(tenant, cost_bytes)


@dataclass(frozen=True, slots=True)
class ConversationEnd:
    """The tokens and the text of a conversation after a turn."""

    tokens: Tokens
    text: bytes  # rendered and escaped, as far as it is known
    text_tokens: int  # number of tokens that the text covers
    reply_tokens: int = 0  # position of the end of the reply; 0 if the text lacks part of it


class Sessions:
    """Looks up and stores the entries of turns. Called by the engine's thread."""

    def __init__(
        self, storage: Storage, shared_namespace: bytes, pins: Pins, encoder: Encoder, log: Log
    ) -> None:
        self.keys = KeyLookup(storage.entries, shared_namespace)
        self._entries = storage.entries
        self.pins = pins
        self._fingerprints = FingerprintSessions(storage.entries, log)
        self._encoder = encoder
        self._policy = storage.settings.cache_write
        self._key_ttl_s = storage.settings.key_ttl

    def find(self, encoded: EncodedRequest) -> Lookup:
        """Look up the entry that the request names; raises NoRoomForPins."""
        request, namespace = encoded.request, encoded.namespace
        write_back = self._write_back(encoded)
        if request.prepare is None or request.prepare.shared is False:
            self._entries.set_cache_limit(namespace, request.cache_bytes)
        if request.prepare is not None:
            if request.prepare.pinned:
                prompt = encoded.prompt
                kv_format = encoded.precision.format_at(len(prompt.tokens))
                handle = PrefixHandle(kv_format.namespace, prompt.tokens, tenant=namespace)
                self.pins.check(handle, cost_bytes(prompt.tokens, prompt.escaped))
            return Lookup(write_back=write_back)
        names = request.names
        if names is None or not request.reuse:
            return Lookup(write_back=write_back)
        entry, problem = self._by_key(encoded, names)
        session = None
        if names.by_fingerprint and encoded.hashes is not None:
            entry, session = self._fingerprints.find(encoded, entry)
        if entry is not None:
            self._entries.touch(entry)
        return Lookup(
            write_back=write_back, entry=entry, problem=problem, fingerprint_session=session
        )

    def nearest(self, turn: Turn) -> Entry | None:
        """The entry whose text has the longest common prefix with the turn's prompt."""
        text = turn.encoded.prompt.escaped
        return self._entries.index.nearest(turn.namespace, text) if text else None

    def count_hit(self, entry: Entry) -> None:
        self._entries.count_hit(entry)

    def _by_key(self, encoded: EncodedRequest, names: Names) -> tuple[Entry | None, Reason | None]:
        """Return the entry of the cache key, or of the first known session key, and what is wrong
        with the cache key."""
        entry, problem, namespace = None, None, encoded.namespace
        if names.cache_key is not None:
            entry = self.keys.find(namespace, names.cache_key, groups=encoded.groups)
            problem = None if entry else self._why_missing(namespace, names.cache_key)
        found = (self._entries.by_name(namespace, name) for name in session_keys(names))
        return entry or next((each for each in found if each), None), problem

    def _why_missing(self, namespace: bytes, key: str) -> Reason:
        if not self._entries.has_expired(namespace, key):
            return Reason.CACHE_KEY_NOT_FOUND
        if entry := self._entries.index.by_key(namespace, key):
            self._entries.expire(entry)
        return Reason.EXPIRED

    def _write_back(self, encoded: EncodedRequest) -> WriteBack:
        names = encoded.request.names
        if names is not None and names.in_memory:
            return WriteBack.NEVER
        if self._policy == "always" or encoded.request.prepare is not None:
            return WriteBack.SOON
        if self._policy == "on-evict":
            return WriteBack.LATE
        if names is not None and _can_be_named(names):
            return WriteBack.SOON
        return WriteBack.LATE if self._policy == "likely" else WriteBack.NEVER

    def remember(self, turn: Turn, finished: Finished) -> None:
        """Store the end of the conversation as an entry, under the request's names."""
        names = turn.request.names or Names()
        if names.wants_message_id or names.message_id is not None:
            finished.message_id = names.message_id or f"msg_{secrets.token_hex(12)}"
        finished.cache.pin_refused = names.pin_s is not None
        if not turn.request.reuse or not finished.cache.cached_tokens:
            return
        entry = self._entries.remember(self._draft(turn, names, finished))
        turn.entry = entry
        if entry is None:
            return
        finished.cache.pin_refused = names.pin_s is not None and not entry.pinned
        if names.return_cache_key or turn.request.prepare is not None:
            finished.cache.new_cache_key = entry.key
        if (session := turn.lookup.fingerprint_session) is not None:
            text = f"extended session {session} fingerprint with assistant response"
            self._fingerprints.info(turn.request, text)

    def remember_unfinished(self, turn: Turn) -> None:
        """Store what a cancelled or failed turn has computed as an entry without a name. A turn
        that continues from there, or that answers the same prompt again, supersedes it."""
        if not turn.request.reuse or not turn.is_started:
            return
        end = self._end(turn) if turn.generated_tokens else _end_of_prompt(turn)
        hashes = turn.encoded.hashes
        segments = hashes.as_sent().segments if hashes else ()
        turn.entry = self._entries.remember(replace(self._unnamed(turn, end), segments=segments))

    def _unnamed(
        self, turn: Turn, end: ConversationEnd, hashes: EntryHashes | None = None
    ) -> Draft:
        """Draft the entry of a turn without names. `hashes` include the reply."""
        names, prepare = turn.request.names or Names(), turn.request.prepare
        replies, continued = _replies_after(self._entries.index, turn, end, hashes)
        ttl_s = names.ttl_s or (self._key_ttl_s if _is_keyed(turn) else None)
        return Draft(
            namespace=turn.namespace,
            kv_namespace=turn.kv_format.namespace,
            tokens=end.tokens,
            text=end.text,
            text_tokens=end.text_tokens,
            replies=replies,
            after=continued,
            segments=hashes.segments if hashes else (),
            ttl_s=prepare.ttl_s if prepare else ttl_s,
            durable=turn.lookup.write_back > WriteBack.NEVER,
        )

    def _draft(self, turn: Turn, names: Names, finished: Finished) -> Draft:
        end, hashes, prepare = self._end(turn), _hashes_after(turn), turn.request.prepare
        unnamed = self._unnamed(turn, end, hashes)
        own_key, session = names.entry_key, turn.lookup.fingerprint_session
        project = [(PROJECT, prepare.project)] if prepare and prepare.project else []
        new_names = list(_new_session_keys(names, finished.message_id, session, hashes))
        can_pin = names.pin_s is not None and self._can_pin_temporarily(turn, end)
        return replace(
            unnamed,
            key=own_key,
            names=(*(name for name in new_names if name[0] in OWN_KINDS), *project),
            shared_names=tuple(name for name in new_names if name[0] not in OWN_KINDS),
            keyed=_is_keyed(turn),
            pinned=prepare is not None and prepare.pinned,
            pin_s=names.pin_s if can_pin else None,
            durable=unnamed.durable or own_key is not None,
        )

    def _can_pin_temporarily(self, turn: Turn, end: ConversationEnd) -> bool:
        handle = PrefixHandle(turn.kv_format.namespace, end.tokens, tenant=turn.namespace)
        more_bytes = cost_bytes(end.tokens, end.text)
        before = self._entries.index.recall(turn.namespace, end.text)
        if before is not None and before.pinned_until_s is not None:
            more_bytes -= before.cost_bytes  # the new entry takes over its pin
        return self.pins.can_pin_temporarily(handle, more_bytes)

    def _end(self, turn: Turn) -> ConversationEnd:
        prompt, output = turn.encoded.prompt, turn.output
        if turn.request.prepare is not None:
            return _end_of_prompt(turn)
        text = output.message.text if output.is_plain else output.raw
        known = self._encoder.known_after(prompt, turn.tokens.part(turn.prompt_tokens), text)
        everything = turn.tokens.all()
        if known is None:
            return ConversationEnd(everything, b"", len(everything))
        count = len(known.tokens)
        if output.is_plain:
            return ConversationEnd(everything[:count], known.escaped, count, count)
        if turn.request.stop:  # the tokens may include text that a stop string cut off
            shown = unescape(known.escaped[len(prompt.escaped) :])
            is_whole = shown.strip() == text.encode().strip() and not output.is_broken_off
            reply_tokens = count if is_whole else 0
            return ConversationEnd(everything[:count], known.escaped, count, reply_tokens)
        reply_tokens = 0 if output.is_broken_off else len(everything)
        return ConversationEnd(everything, known.escaped, count, reply_tokens)


def _end_of_prompt(turn: Turn) -> ConversationEnd:
    prompt = turn.encoded.prompt
    return ConversationEnd(prompt.tokens, prompt.escaped, len(prompt.tokens))


def _is_keyed(turn: Turn) -> bool:
    """Whether the client knows the key of the turn's entry."""
    names = turn.request.names or Names()
    is_prepared = turn.request.prepare is not None
    return names.return_cache_key or is_prepared or names.entry_key is not None


def _hashes_after(turn: Turn) -> EntryHashes | None:
    """The hashes of the conversation including the reply, or None if it has no messages."""
    hashes = turn.encoded.hashes
    if hashes is None:
        return None
    if turn.request.prepare is not None:
        return hashes.as_sent()
    return hashes.after(turn.output.message.as_dict())


def _replies_after(
    entries: EntryIndex, turn: Turn, end: ConversationEnd, hashes: EntryHashes | None
) -> tuple[tuple[Reply, ...], Entry | None]:
    """Return all replies of the conversation, and the entry that it continues.

    Looks the earlier replies up again. Since the request was encoded, their entry may have been
    deleted, or superseded by one that has the same replies.
    """
    prompt, output, sent = turn.encoded.prompt, turn.output, turn.encoded.hashes
    if sent is None or not turn.request.messages or not prompt.escaped:
        return (), None
    known = find_replies(entries, turn.namespace, sent)
    replies, continued = still_valid(known, end.text, end.tokens)
    if hashes and hashes.reply_keys:
        replies.append(
            Reply(
                keys=hashes.reply_keys,
                message=b"" if output.is_plain else canonical(output.message.as_dict()),
                prompt_bytes=len(prompt.escaped),
                prompt_tokens=turn.prompt_tokens,
                end_tokens=end.reply_tokens,
                end_bytes=len(end.text) if output.is_plain else 0,
            )
        )
    return tuple(replies), continued
