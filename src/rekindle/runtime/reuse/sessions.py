"""Finds the entry that a request names, and stores the end of a turn under the request's names.

A name only proposes an entry. Comparing tokens decides what is reused.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rekindle.chat.encode import Encoder
from rekindle.chat.escaping import unescape
from rekindle.chat.message_hashes import EntryHashes
from rekindle.chat.messages import canonical
from rekindle.engine.base import KvLayout
from rekindle.errors import NoRoomForPins
from rekindle.kvcache.block import PrefixHandle, WriteBack
from rekindle.kvcache.entries.entries import Entries
from rekindle.kvcache.entries.entry import Draft, Entry, Name, Reply
from rekindle.kvcache.entries.index import EntryIndex
from rekindle.kvcache.store import Store
from rekindle.protocol.events import Finished, Reason
from rekindle.protocol.frames import LogLine
from rekindle.protocol.requests import GenerateRequest, Names
from rekindle.protocol.settings import WritePolicy
from rekindle.runtime.encode.chat import find_replies, still_valid
from rekindle.runtime.encode.request import EncodedRequest, Lookup
from rekindle.runtime.schedule.turn import Turn
from rekindle.tokens import Tokens

# The kinds of session keys: (kind, key) names an entry of a tenant.
SESSION, NUMBER = "session_id", "kv_cache_session_id"
MESSAGE, PROMPT = "message_id", "prompt_cache_key"
FINGERPRINT, FINGERPRINT_SESSION = "fingerprint", "auto_session"

Log = Callable[[LogLine], None]


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
    """The session keys of a finished turn's entry."""
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
            self._info(encoded.request, f"matched existing session {session}")
            return found, session
        session = self._new_session(namespace)
        self._info(encoded.request, f"registered new session {session}")
        return entry, session

    def log_extended(self, request: GenerateRequest, session: str) -> None:
        self._info(request, f"extended session {session} fingerprint with assistant response")

    def _info(self, request: GenerateRequest, text: str) -> None:
        self._log(LogLine("info", f"FingerprintManager: {text}", request.request_id))

    def _new_session(self, namespace: bytes) -> str:
        last = self._last.get(namespace)
        if last is None:  # continue after the sessions of the previous runtime
            taken = (_session_of(entry) for entry in self._entries.of(namespace))
            last = max((int(name.rpartition("_")[2]) for name in taken if name), default=-1)
        self._last[namespace] = last + 1
        return f"auto_session_{last + 1}"


def _session_of(entry: Entry | None) -> str | None:
    names = entry.names if entry else ()
    return next((name for kind, name in names if kind == FINGERPRINT_SESSION), None)


class Pins:
    """Checks that pinned entries fit on the last tier. Each tenant may pin an equal share of it."""

    def __init__(self, entries: Entries, store: Store, kv_layout: KvLayout) -> None:
        self._entries = entries
        self._conversations = store.conversations
        self._kv_layout = kv_layout

    def check(self, candidate: PrefixHandle) -> None:
        """Raise NoRoomForPins unless this entry fits together with everything already pinned."""
        living = self._entries.of(None)
        pinned = [entry for entry in living if entry.pinned]
        own = [entry for entry in pinned if entry.tenant == candidate.tenant]
        tenants = {candidate.tenant, *(entry.tenant for entry in living)}
        limit = self._conversations.pin_limit_bytes
        for entries, limit_bytes in ((pinned, limit), (own, limit // len(tenants))):
            needed = self._conversations.lasting_bytes(
                [*entries, candidate], self._kv_layout.token_bytes, self._kv_layout.checkpoint_bytes
            )
            if needed > limit_bytes or not self._entries.budget.has_room:
                raise NoRoomForPins(
                    f"With this entry, pinned entries would take {needed} bytes, but the limit is "
                    f"{limit_bytes}. Unpin or delete another, or raise --disk-cache."
                )

    def can_pin_temporarily(self, tenant: bytes, tokens: Tokens) -> bool:
        """Whether a pin with a time limit may be added.

        All temporary pins share half of the room for pins, in equal parts for each tenant. The
        estimate is fast: it counts each entry as if it shared no blocks with others.
        """
        living = self._entries.of(None)
        tenants = {tenant, *(entry.tenant for entry in living)}
        own = (entry for entry in living if entry.pinned and entry.tenant == tenant)
        others = (each for each in own if not tokens.startswith(each.tokens))
        count = len(tokens) + sum(len(entry.tokens) for entry in others)
        limit_bytes = self._conversations.pin_limit_bytes // (2 * len(tenants))
        return count * self._kv_layout.token_bytes <= limit_bytes


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
        self,
        entries: Entries,
        pins: Pins,
        encoder: Encoder,
        log: Log,
        *,
        policy: WritePolicy,
        key_ttl_s: float | None,
    ) -> None:
        self._entries = entries
        self._pins = pins
        self._fingerprints = FingerprintSessions(entries, log)
        self._encoder = encoder
        self._policy = policy
        self._key_ttl_s = key_ttl_s

    def find(self, encoded: EncodedRequest) -> Lookup:
        """Look up the entry that the request names; raises NoRoomForPins."""
        request, namespace = encoded.request, encoded.namespace
        write_back = self._write_back(encoded)
        if request.prepare is not None:
            if request.prepare.pinned:
                tokens = encoded.prompt.tokens
                kv_format = encoded.precision.format_at(len(tokens))
                self._pins.check(PrefixHandle(kv_format.namespace, tokens, tenant=namespace))
            return Lookup(write_back=write_back)
        names = request.names
        if names is None or not request.reuse:
            return Lookup(write_back=write_back)
        entry, problem = self._by_key(namespace, names)
        session = None
        if names.by_fingerprint and encoded.hashes is not None:
            entry, session = self._fingerprints.find(encoded, entry)
        if entry is not None:
            self._entries.touch(entry)
        return Lookup(
            write_back=write_back, entry=entry, problem=problem, fingerprint_session=session
        )

    def count_hit(self, turn: Turn) -> None:
        """Count a hit for the named entry, or for the entry with the longest common text."""
        named = None if turn.lookup.problem else turn.lookup.entry
        text = turn.encoded.prompt.escaped
        entry = named or self._entries.index.nearest(turn.namespace, text)
        if entry is not None and text:
            self._entries.count_hit(entry)

    def _by_key(self, namespace: bytes, names: Names) -> tuple[Entry | None, Reason | None]:
        """Return the entry of the cache key, or of the first known session key, and what is wrong
        with the cache key."""
        entry, problem = None, None
        if names.cache_key is not None:
            entry = self._entries.by_key(namespace, names.cache_key)
            problem = None if entry else self._why_missing(namespace, names.cache_key)
        found = (self._entries.by_name(namespace, name) for name in session_keys(names))
        return entry or next((each for each in found if each), None), problem

    def _why_missing(self, namespace: bytes, key: str) -> Reason:
        if not self._entries.has_expired(namespace, key):
            return Reason.CACHE_KEY_NOT_FOUND
        self._entries.collect(namespace)
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
        if not turn.request.reuse or not finished.cache.cached_tokens:
            return
        entry = self._entries.remember(self._draft(turn, names, finished))
        if entry is None:
            return
        if names.return_cache_key or turn.request.prepare is not None:
            finished.cache.new_cache_key = entry.key
        if turn.lookup.fingerprint_session is not None:
            self._fingerprints.log_extended(turn.request, turn.lookup.fingerprint_session)

    def _draft(self, turn: Turn, names: Names, finished: Finished) -> Draft:
        end, hashes, prepare = self._end(turn), _hashes_after(turn), turn.request.prepare
        replies, continued = _replies_after(self._entries.index, turn, end, hashes)
        own_key, session = names.entry_key, turn.lookup.fingerprint_session
        keyed = names.return_cache_key or prepare is not None or own_key is not None
        can_pin = names.pin_s and self._pins.can_pin_temporarily(turn.namespace, end.tokens)
        ttl_s = names.ttl_s or (self._key_ttl_s if keyed else None)
        return Draft(
            key=own_key,
            namespace=turn.namespace,
            kv_namespace=turn.kv_format.namespace,
            tokens=end.tokens,
            text=end.text,
            text_tokens=end.text_tokens,
            replies=replies,
            after=continued,
            segments=hashes.segments if hashes else (),
            names=tuple(_new_session_keys(names, finished.message_id, session, hashes)),
            ttl_s=prepare.ttl_s if prepare else ttl_s,
            keyed=keyed,
            pinned=prepare is not None and prepare.pinned,
            pin_s=names.pin_s if can_pin else None,
            durable=turn.lookup.write_back > WriteBack.NEVER or own_key is not None,
        )

    def _end(self, turn: Turn) -> ConversationEnd:
        prompt, output = turn.encoded.prompt, turn.output
        if turn.request.prepare is not None:
            return ConversationEnd(prompt.tokens, prompt.escaped, len(prompt.tokens))
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
