"""Questions about the cache and changes to it, as one tenant sees it or as the admin does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from blake3 import blake3
from msgspec.structs import replace

from rekindle.chat.preview import Preview
from rekindle.errors import BadRequest, CacheKeyNotFound, NotFound
from rekindle.kvcache.block import PrefixHandle, chain
from rekindle.kvcache.entries import Draft, Entry
from rekindle.protocol.admin import (
    AdminRequest,
    AdminResult,
    CollectExpired,
    DeleteEntry,
    EntryInfo,
    EntryList,
    EntryName,
    Flush,
    GetStats,
    IndexPrompt,
    ListEntries,
    PinEntry,
    Removed,
    RemoveOld,
    RemoveSession,
    Segment,
    ShowEntry,
    Stats,
    Validate,
    Validation,
)
from rekindle.protocol.events import Reason, Status
from rekindle.runtime.input_processor import InputProcessor
from rekindle.runtime.kv_manager import KvManager
from rekindle.runtime.pipeline import Pipeline
from rekindle.runtime.planner import Planner
from rekindle.runtime.report import Evidence, changed_at, compare, first_message_tokens, judge
from rekindle.runtime.request import EncodedPrompt
from rekindle.runtime.scheduler import Scheduler
from rekindle.runtime.sessions import MESSAGE, NUMBER, SESSION, Sessions
from rekindle.runtime.storage import Storage

Reply = Callable[[AdminResult], None]
View = bytes | None  # the namespace that is seen; None: all of them


class Admin:
    """Called by the engine's thread."""

    def __init__(
        self,
        storage: Storage,
        input_processor: InputProcessor,
        sessions: Sessions,
        kv: KvManager,
        planner: Planner,
        pipeline: Pipeline,
        scheduler: Scheduler,
        preview: Preview,
    ) -> None:
        self._storage = storage
        self._entries = storage.entries
        self._store = storage.store
        self._clock = storage.clock
        self._input_processor = input_processor
        self._sessions = sessions
        self._kv = kv
        self._planner = planner
        self._pipeline = pipeline
        self._scheduler = scheduler
        self._preview = preview

    def answer(self, request: AdminRequest, prompt: EncodedPrompt | None, reply: Reply) -> None:
        """Reply now, or when the disk has done what was asked; raises a ServerError instead."""
        namespace = self._input_processor.namespace(request.salt)
        view = None if request.admin else namespace
        match request.op:
            case ListEntries() | ShowEntry() | GetStats() as op:
                reply(self._look(op, view, namespace))
            case Flush(key):
                self._flush(view, key, reply)
            case PinEntry(key, pinned):
                self._pin(self._find(view, key), reply, pinned=pinned)
            case Validate() as op:
                assert prompt is not None, "its prompt is encoded first"
                reply(self._validate(op, namespace, prompt))
            case IndexPrompt() as op:
                assert prompt is not None, "its prompt is encoded first"
                self._index(op, namespace, prompt, reply)
            case op:
                removed = self._remove(op, view)
                self._when_durable(lambda durable: reply(replace(removed, durable=durable)))

    def _look(self, op: ListEntries | ShowEntry | GetStats, view: View, own: bytes) -> AdminResult:
        match op:
            case ListEntries():
                return EntryList([self._seen(entry, own) for entry in self._entries.of(view)])
            case ShowEntry(key):
                return self._seen(self._find(view, key), own)
            case GetStats():
                return self._stats(view)

    def _find(self, view: View, key: str) -> Entry:
        """The entry, or CacheKeyNotFound: another tenant's is as unknown as any."""
        if view is not None:
            entry = self._entries.by_key(view, key)
        else:
            entry = next((each for each in self._entries.of(None) if each.key == key), None)
        if entry is None:
            raise CacheKeyNotFound
        return entry

    def _named(self, view: View, name: int | str) -> list[Entry]:
        kinds = (NUMBER,) if isinstance(name, int) else (SESSION, MESSAGE)
        found = [
            entry
            for entry in self._entries.of(view)
            if any((kind, str(name)) in entry.names for kind in kinds)
        ]
        if not found:
            raise NotFound(
                "No such session; GET /v1/internal/model/kv_cache/info lists those there are.",
                param="session_id",
            )
        return found

    # -- changing ------------------------------------------------------------------------------

    def _when_durable(self, then: Callable[[bool], None]) -> None:
        """Answer when what was asked outlives the process, or when the disk has failed to take it:
        in memory it holds in any case. Without a disk, at once."""
        self._store.tiers.flush(then)

    def _reply_when_durable(self, entry: Entry, reply: Reply) -> None:
        self._when_durable(lambda durable: reply(replace(self.info(entry), durable=durable)))

    def _remove(
        self, op: DeleteEntry | RemoveSession | RemoveOld | CollectExpired, view: View
    ) -> Removed:
        match op:
            case CollectExpired():
                return Removed(*self._entries.collect(view))
            case DeleteEntry(key):
                entries = [self._find(view, key)]
            case RemoveSession(name):
                entries = self._named(view, name)
            case RemoveOld(seconds):
                entries = self._entries.older(view, seconds)
        return Removed(len(entries), sum(self._entries.remove(entry) for entry in entries))

    def _pin(self, entry: Entry, reply: Reply, *, pinned: bool) -> None:
        if pinned and not entry.pinned:
            self._sessions.check_pin(entry)
            self._entries.pin(entry)
            if entry.block is not None and entry.durable:
                self._store.write_chain(entry.block)
        elif not pinned:
            self._entries.unpin(entry)
        self._reply_when_durable(entry, reply)

    def _index(
        self, op: IndexPrompt, namespace: bytes, encoded: EncodedPrompt, reply: Reply
    ) -> None:
        """An entry that knows its tokens before any of them is computed."""
        prompt = encoded.prompt
        if op.prepare.pinned:
            self._sessions.check_pin(PrefixHandle(namespace, prompt.tokens))
        entry = self._entries.remember(
            Draft(
                namespace=namespace,
                tokens=prompt.tokens,
                text=prompt.escaped,
                segments=encoded.hashes.segments if encoded.hashes else (),
                ttl_s=op.prepare.ttl_s,
                keyed=True,
                pinned=op.prepare.pinned,
                is_computed=False,
            )
        )
        if entry is None:
            raise BadRequest("the prompt is too long to be remembered", param="messages")
        self._reply_when_durable(entry, reply)

    def _flush(self, view: View, key: str, reply: Reply) -> None:
        """Reply when the entry is stored as safely as this server can."""
        entry = self._entries.any_by_key(view, key)  # its time may have been shorter than the work
        if entry is None:
            raise CacheKeyNotFound
        self._kv.export(entry, lambda: self._write(entry, reply))

    def _write(self, entry: Entry, reply: Reply) -> None:
        """Have all that is stored of an entry written, and reply then."""
        if entry.block is not None and entry.durable:
            self._store.write_chain(entry.block)
        self._reply_when_durable(entry, reply)

    # -- looking -------------------------------------------------------------------------------

    def _validate(self, op: Validate, namespace: bytes, encoded: EncodedPrompt) -> Validation:
        """Would this request hit? Nothing is changed, nothing counted."""
        entry = self._entries.by_key(namespace, op.cache_key)
        if entry is None:
            expired = self._entries.has_expired(namespace, op.cache_key)
            reason = Reason.EXPIRED if expired else Reason.CACHE_KEY_NOT_FOUND
            return Validation(status="miss", reusable_tokens=0, invalidated_at=None, reason=reason)
        prompt = encoded.prompt
        named = compare(entry, prompt, encoded.hashes)
        usable = prompt.tokens[:-1]
        match = self._planner.match(namespace, usable)
        reusable = min(self._planner.reusable_tokens(namespace, usable), named.common_tokens)
        verdict = judge(
            Evidence(
                prompt_tokens=len(prompt.tokens),
                first_message_tokens=first_message_tokens(prompt, op.tools),
                reused_tokens=reusable,
                matched_tokens=match.tokens,
                diverged=match.diverged,
                changed=changed_at(prompt, match.tokens),
                can_truncate=self._planner.can_truncate,
                named=named,
            )
        )
        return Validation(
            status=verdict.status,
            reusable_tokens=reusable,
            invalidated_at=named.changed,
            reason=verdict.reason,
            diverged_at=named.diverged_at,
        )

    def info(self, entry: Entry) -> EntryInfo:
        blocks, ends = list(chain(entry.block)), list(self._planner.resume_points(entry))
        left_s = entry.expires_in_s(self._clock)
        count = len(entry.tokens)
        stored = (block.stop for block in ends if block.stored)
        return EntryInfo(
            cache_key=entry.key,
            segments=[Segment(*segment) for segment in entry.segments],
            token_count=count,
            tier=self._store.tiers.slowest(blocks),
            size_bytes=sum(block.size_bytes for block in blocks),
            held_tokens=min(max((block.stop for block in ends), default=0), count),
            stored_tokens=min(max(stored, default=0), count),
            hit_count=entry.hits,
            pinned=entry.pinned,
            ttl=entry.ttl_s,
            created_at=entry.created_at,
            last_used=entry.last_used_at,
            expires_at=None if left_s is None else self._clock.wall_s() + left_s,
            names=[EntryName(kind, name) for kind, name in sorted(entry.names)],
            tenant=blake3(entry.namespace).hexdigest()[:12],
        )

    def _seen(self, entry: Entry, own: bytes) -> EntryInfo:
        """With words by which its own tenant recognises it; an admin is not shown other people's
        text."""
        info = self.info(entry)
        return (
            replace(info, preview=self._preview.of(entry.text)) if entry.namespace == own else info
        )

    def _stats(self, view: View) -> Stats:
        entries = [self.info(entry) for entry in self._entries.of(view)]
        blocks = [block for block in self._store if view in (None, block.namespace)]
        turns: Counter[Status] = Counter()
        for namespace, counts in self._pipeline.statuses.items():
            if view in (None, namespace):
                turns += counts
        ram_bytes, disk_bytes = self._storage.held_bytes(view)
        stats = Stats(
            entries=len(entries),
            pinned_entries=sum(entry.pinned for entry in entries),
            by_tier=dict(Counter(entry.tier for entry in entries if entry.tier)),
            ram_bytes=ram_bytes,
            disk_bytes=disk_bytes,
            unique_bytes=sum(block.size_bytes for block in blocks),
            logical_bytes=sum(entry.size_bytes for entry in entries),
            hits=turns["hit"],
            partial_hits=turns["partial_hit"],
            misses=turns["miss"],
            evictions=self._store.evictions(view),
        )
        if view is None:
            stats.computed_tokens = self._kv.counts.computed_tokens
            stats.reused_tokens = self._kv.counts.reused_tokens
            stats.active_turns = self._scheduler.turns
            self._storage.add_totals(stats)
        return stats
