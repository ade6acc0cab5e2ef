"""Names in requests: which entry a name stands for, and what is remembered after a turn.

A name proposes an entry; what is reused is decided by comparing tokens.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rekindle.chat.encode import Encoder
from rekindle.chat.escaping import unescape
from rekindle.chat.message_hashes import EntryHashes
from rekindle.engine.base import KvLayout
from rekindle.errors import NoRoomForPins
from rekindle.kvcache.block import PrefixHandle, WriteBack
from rekindle.kvcache.entries.entries import Draft, Entries, Entry, Name
from rekindle.kvcache.store import Store
from rekindle.protocol.events import Finished, Reason
from rekindle.protocol.frames import LogLine
from rekindle.protocol.requests import GenerateRequest, Names
from rekindle.protocol.settings import WritePolicy
from rekindle.runtime.encode.replay import replies_after
from rekindle.runtime.encode.request import EncodedRequest, Lookup
from rekindle.runtime.schedule.turn import Turn
from rekindle.tokens import Tokens

# ----------------------------------------------------------------------
# The kinds of names that requests give conversations.

SESSION, NUMBER, MESSAGE, PROMPT = (
    "session_id",
    "kv_cache_session_id",
    "message_id",
    "prompt_cache_key",
)
FINGERPRINT, AUTO_SESSION = "fingerprint", "auto_session"


def proposals(names: Names) -> Iterator[Name]:
    """The names a request was given but its key, the surest first."""
    if names.session_id is not None:
        yield SESSION, names.session_id
    if names.session_number is not None:
        yield NUMBER, str(names.session_number)
    for message in names.message_ids:
        yield MESSAGE, message
    if names.prompt_cache_key is not None:
        yield PROMPT, names.prompt_cache_key


def new_names(
    names: Names, message_id: str | None, auto_session: str | None, hashes: EntryHashes | None
) -> Iterator[Name]:
    """What a turn's entry is called from now on."""
    yield from (name for name in proposals(names) if name[0] != MESSAGE)
    if message_id is not None:
        yield MESSAGE, message_id
    if auto_session is not None and hashes is not None:
        yield AUTO_SESSION, auto_session
        yield FINGERPRINT, hashes.fingerprint


def is_named(names: Names) -> bool:
    """Whether a client may ask for this conversation by something it gave or was given."""
    keyed = names.cache_key or names.entry_key or names.return_cache_key
    asked = keyed or names.wants_message_id or names.message_id is not None
    return bool(asked or names.by_fingerprint or any(True for _ in proposals(names)))


# ----------------------------------------------------------------------
# Conversations that are known by their looks, and get a session of their own.

Log = Callable[[LogLine], None]


class AutoSessions:
    """Numbers the sessions of each tenant, from those of a runtime before this one on."""

    def __init__(self, entries: Entries, log: Log) -> None:
        self._entries = entries
        self._log = log
        self._last: dict[bytes, int] = {}  # the last number given, by namespace

    def find(self, encoded: EncodedRequest, entry: Entry | None) -> tuple[Entry | None, str]:
        """The entry and the session of a conversation that is known by its looks; a new session for
        one that is not, whose entry may have been named."""
        assert encoded.hashes is not None
        namespace, previous = encoded.namespace, encoded.hashes.previous_fingerprint
        found = self._entries.by_name(namespace, (FINGERPRINT, previous)) if previous else None
        known = _session_of(found)
        if found is not None and known is not None:
            self._info(encoded.request, f"matched existing session {known}")
            return found, known
        session = self._new_session(namespace)
        self._info(encoded.request, f"registered new session {session}")
        return entry, session

    def extend(self, request: GenerateRequest, session: str) -> None:
        """A turn of the session is remembered, and will be known by its looks, too."""
        self._info(request, f"extended session {session} fingerprint with assistant response")

    def _info(self, request: GenerateRequest, text: str) -> None:
        self._log(LogLine("info", f"FingerprintManager: {text}", request.request_id))

    def _new_session(self, namespace: bytes) -> str:
        last = self._last.get(namespace)
        if last is None:  # those of a runtime before this one
            taken = (_session_of(entry) for entry in self._entries.of(namespace))
            last = max((int(name.rpartition("_")[2]) for name in taken if name), default=-1)
        self._last[namespace] = last + 1
        return f"auto_session_{last + 1}"


def _session_of(entry: Entry | None) -> str | None:
    names = entry.names if entry else ()
    return next((name for kind, name in names if kind == AUTO_SESSION), None)


# ----------------------------------------------------------------------
# Pins: whether there is room to keep one more conversation for good, or for a while.


class Pins:
    """Pinned state rests on the last tier, of several tenants each may pin its share of it."""

    def __init__(self, entries: Entries, store: Store, kv_layout: KvLayout) -> None:
        self._entries = entries
        self._conversations = store.conversations
        self._kv_layout = kv_layout

    def check(self, candidate: PrefixHandle) -> None:
        """Raise NoRoomForPins unless everything pinned, and this too, has room for good."""
        living = self._entries.of(None)
        pinned = [entry for entry in living if entry.pinned]
        own = [entry for entry in pinned if entry.tenant == candidate.tenant]
        tenants = {candidate.tenant, *(entry.tenant for entry in living)}
        limit = self._conversations.pin_limit_bytes
        for entries, most in ((pinned, limit), (own, limit // len(tenants))):
            needed = self._conversations.lasting_bytes(
                [*entries, candidate],
                self._kv_layout.token_bytes,
                self._kv_layout.checkpoint_bytes,
            )
            if needed > most or not self._entries.budget.has_room:
                raise NoRoomForPins(
                    f"With this one, pinned entries would take {needed} of the {most} bytes they "
                    "may take. Unpin or delete another, or raise --disk-cache."
                )

    def has_room_for_a_while(self, tenant: bytes, tokens: Tokens) -> bool:
        """Whether a pin for a while may be added. They share half of the room for pins, in equal
        parts for each tenant; each counts as if it shared nothing, which is soon found."""
        living = self._entries.of(None)
        tenants = {tenant, *(entry.tenant for entry in living)}
        own = (entry for entry in living if entry.pinned and entry.tenant == tenant)
        going_on = (each for each in own if not tokens.startswith(each.tokens))
        count = len(tokens) + sum(len(entry.tokens) for entry in going_on)
        most = self._conversations.pin_limit_bytes // (2 * len(tenants))
        return count * self._kv_layout.token_bytes <= most


@dataclass(frozen=True, slots=True)
class ConversationEnd:
    """What is remembered of a conversation after a turn."""

    tokens: Tokens
    text: bytes  # rendered and escaped, as far as it is known
    text_tokens: int  # that the text stands for
    reply_tokens: int = 0  # up to the end of the reply, when the text shows all of it


class Sessions:
    """Called by the engine's thread."""

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
        self._auto_sessions = AutoSessions(entries, log)
        self._encoder = encoder
        self._policy = policy
        self._key_ttl_s = key_ttl_s

    # -- before a turn -------------------------------------------------------------------------

    def find(self, encoded: EncodedRequest) -> Lookup:
        """The entry that the request names; raises NoRoomForPins."""
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
        auto_session = None
        if names.by_fingerprint and encoded.hashes is not None:
            entry, auto_session = self._auto_sessions.find(encoded, entry)
        if entry is not None:
            self._entries.touch(entry)
        return Lookup(
            write_back=write_back, entry=entry, problem=problem, auto_session=auto_session
        )

    def count_hit(self, turn: Turn) -> None:
        """A turn reuses state: of the entry it named, or else of one that begins like it."""
        named = None if turn.lookup.problem else turn.lookup.entry
        text = turn.encoded.prompt.escaped
        entry = named or self._entries.index.nearest(turn.namespace, text)
        if entry is not None and text:
            self._entries.count_hit(entry)

    def _by_key(self, namespace: bytes, names: Names) -> tuple[Entry | None, Reason | None]:
        """The entry of the key, or else of the first known name; and what is wrong with the key."""
        entry, problem = None, None
        if names.cache_key is not None:
            entry = self._entries.by_key(namespace, names.cache_key)
            problem = None if entry else self._why_missing(namespace, names.cache_key)
        found = (self._entries.by_name(namespace, name) for name in proposals(names))
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
        if names is not None and is_named(names):
            return WriteBack.SOON
        return WriteBack.LATE if self._policy == "likely" else WriteBack.NEVER

    # -- after a turn --------------------------------------------------------------------------

    def remember(self, turn: Turn, finished: Finished) -> None:
        """Keep the conversation's end as an entry, with the names the request asks for."""
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
        if turn.lookup.auto_session is not None:
            self._auto_sessions.extend(turn.request, turn.lookup.auto_session)

    def _draft(self, turn: Turn, names: Names, finished: Finished) -> Draft:
        end, hashes, prepare = self._end(turn), _hashes_after(turn), turn.request.prepare
        replies, before = replies_after(
            self._entries.index,
            turn,
            end.text,
            end.tokens,
            keys=hashes.reply_keys if hashes else (),
            end_tokens=end.reply_tokens,
        )
        own_key = names.entry_key
        keyed = names.return_cache_key or prepare is not None or own_key is not None
        has_room = names.pin_s and self._pins.has_room_for_a_while(turn.namespace, end.tokens)
        ttl_s = names.ttl_s or (self._key_ttl_s if keyed else None)
        return Draft(
            key=own_key,
            namespace=turn.namespace,
            kv_namespace=turn.kv_format.namespace,
            tokens=end.tokens,
            text=end.text,
            text_tokens=end.text_tokens,
            replies=replies,
            after=before,
            segments=hashes.segments if hashes else (),
            names=tuple(new_names(names, finished.message_id, turn.lookup.auto_session, hashes)),
            ttl_s=prepare.ttl_s if prepare else ttl_s,
            keyed=keyed,
            pinned=prepare is not None and prepare.pinned,
            pin_s=names.pin_s if has_room else None,
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
        spelt = everything[:count]
        if output.is_plain:
            return ConversationEnd(spelt, known.escaped, count, count)
        if turn.request.stop:  # what a stop string cut off is among the tokens
            shown = unescape(known.escaped[len(prompt.escaped) :])
            is_whole = shown.strip() == text.encode().strip() and not output.is_broken_off
            return ConversationEnd(spelt, known.escaped, count, count if is_whole else 0)
        reply_tokens = 0 if output.is_broken_off else len(everything)
        return ConversationEnd(everything, known.escaped, count, reply_tokens)


def _hashes_after(turn: Turn) -> EntryHashes | None:
    """Those of the conversation with the reply, if there is one."""
    hashes = turn.encoded.hashes
    if hashes is None:
        return None
    if turn.request.prepare is not None:
        return hashes.as_sent()
    return hashes.after(turn.output.message.as_dict())
