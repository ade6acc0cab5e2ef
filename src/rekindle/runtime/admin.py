"""Questions about the cache, answered as one tenant sees it, or as the admin does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from blake3 import blake3

from rekindle.chat.encode import Prompt
from rekindle.chat.message_hashes import segments
from rekindle.errors import BadRequest, CacheKeyNotFound, NotFound
from rekindle.kvcache.block import PrefixHandle, chain
from rekindle.kvcache.clock import Clock
from rekindle.kvcache.entries import Draft, Entries, Entry
from rekindle.kvcache.store import Store
from rekindle.protocol.admin import (
    AdminOp,
    AdminResult,
    CollectExpired,
    DeleteEntry,
    EntryInfo,
    EntryList,
    EntryName,
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
from rekindle.runtime.kv_manager import Device
from rekindle.runtime.sessions import MESSAGE, NUMBER, SESSION, Sessions
from rekindle.tokens import Tokens

Reply = Callable[[AdminResult], None]


class Queries:
    """Called by the engine's thread. `root` is the asking tenant's, None that of the admin."""

    def __init__(
        self, entries: Entries, store: Store, device: Device, names: Sessions, clock: Clock
    ) -> None:
        self._entries = entries
        self._store = store
        self._device = device
        self._names = names
        self._clock = clock
        self.disk_state = "off"  # of a runtime without a disk tier: why it has none

    def answer(self, op: AdminOp, root: bytes, *, admin: bool) -> AdminResult:
        """All but Settle, which takes its time, and what needs a prompt encoded first."""
        view = None if admin else root
        match op:
            case ListEntries():
                return EntryList([self.info(entry) for entry in self._entries.of(view)])
            case ShowEntry(key):
                return self.info(self.find(view, key))
            case GetStats():
                return self._stats(view)
            case DeleteEntry(key):
                return self._remove([self.find(view, key)])
            case PinEntry(key, pinned):
                return self._pin(self.find(view, key), pinned=pinned)
            case CollectExpired():
                return Removed(*self._entries.collect(view))
            case RemoveSession(name):
                return self._remove(self._named(view, name))
            case RemoveOld(seconds):
                return self._remove(self._entries.older(view, seconds))
        raise BadRequest(f"{type(op).__name__} cannot be answered here")

    def find(self, view: bytes | None, key: str) -> Entry:
        """The entry, or CacheKeyNotFound: another tenant's is as unknown as any."""
        if view is not None:
            entry = self._entries.by_key(view, key)
        else:
            entry = next((each for each in self._entries.of(None) if each.key == key), None)
        if entry is None:
            raise CacheKeyNotFound
        return entry

    def _named(self, view: bytes | None, name: int | str) -> list[Entry]:
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

    def _remove(self, entries: list[Entry]) -> Removed:
        return Removed(len(entries), sum(self._entries.remove(entry) for entry in entries))

    def _pin(self, entry: Entry, *, pinned: bool) -> EntryInfo:
        if pinned and not entry.pinned:
            self._names.check_pin(entry)
            self._entries.pin(entry)
            if entry.block is not None and entry.durable:
                self._store.write_chain(entry.block)
        elif not pinned:
            self._entries.unpin(entry)
        return self.info(entry)

    # -- prompts -------------------------------------------------------------------------------

    def index(self, op: IndexPrompt, root: bytes, prompt: Prompt) -> EntryInfo:
        """An entry that knows its tokens before any of them is computed."""
        tokens = Tokens.of(prompt.tokens)
        if op.prepare.pinned:
            self._names.check_pin(PrefixHandle(root, tokens))
        entry = self._entries.remember(
            Draft(
                namespace=root,
                tokens=tokens,
                text=prompt.marked,
                segments=segments(op.messages, op.tools),
                ttl_s=op.prepare.ttl_s,
                keyed=True,
                pinned=op.prepare.pinned,
                is_computed=False,
            )
        )
        if entry is None:
            raise BadRequest("the prompt is too long to be remembered", param="messages")
        return self.info(entry)

    def validate(self, op: Validate, root: bytes, prompt: Prompt) -> Validation:
        """Would this request hit? Nothing is touched, nothing counted."""
        entry = self._entries.by_key(root, op.cache_key)
        if entry is None:
            expired = self._entries.has_expired(root, op.cache_key)
            reason = Reason.EXPIRED if expired else Reason.CACHE_KEY_NOT_FOUND
            return Validation(status="miss", reusable_tokens=0, invalidated_at=None, reason=reason)
        told = self._names.compare(entry, prompt, op.messages, op.tools)
        tokens = Tokens.of(prompt.tokens[:-1])
        stored = self._device.reusable_tokens(root, tokens)
        reusable = min(stored, told.common_tokens)
        short = told.covers and stored < told.common_tokens - 1
        evicted = self._device.equal_tokens(root, tokens) < told.common_tokens - 1
        status: Status = "hit" if told.covers and not short else "partial_hit"
        return Validation(
            status=status if reusable else "miss",
            reusable_tokens=reusable,
            invalidated_at=told.changed,
            reason=(Reason.EVICTED if evicted else Reason.CHECKPOINT_BOUNDARY)
            if short
            else told.reason,
            diverged_at=told.diverged_at,
        )

    def settle(self, key: str, view: bytes | None, reply: Reply) -> None:
        """Answer when the entry is stored as safely as this server can."""
        entry = self._entries.any_by_key(view, key)  # its time may have been shorter than the work
        if entry is None:
            raise CacheKeyNotFound
        self._device.keep_everything()
        if entry.block is None or not entry.durable:
            reply(self.info(entry))
            return
        self._store.write_chain(entry.block)
        self._store.flush(lambda: reply(self.info(entry)))

    # -- words ---------------------------------------------------------------------------------

    def info(self, entry: Entry) -> EntryInfo:
        blocks, ends = list(chain(entry.block)), list(self._device.ends(entry))
        left_s = entry.expires_in_s(self._clock)
        tokens = len(entry.tokens)
        return EntryInfo(
            cache_key=entry.key,
            segments=[Segment(*segment) for segment in entry.segments],
            token_count=tokens,
            tier=self._store.slowest_tier(blocks),
            size_bytes=sum(block.size_bytes for block in blocks),
            held_tokens=min(max((b.stop for b in ends), default=0), tokens),
            stored_tokens=min(max((b.stop for b in ends if b.stored), default=0), tokens),
            hit_count=entry.hits,
            pinned=entry.pinned,
            ttl=entry.ttl_s,
            created_at=entry.created_at,
            last_used=entry.last_used_at,
            expires_at=None if left_s is None else self._clock.wall_s() + left_s,
            names=[EntryName(kind, name) for kind, name in sorted(entry.names)],
            tenant=blake3(entry.namespace).hexdigest()[:12],
        )

    def _stats(self, view: bytes | None) -> Stats:
        entries = [self.info(entry) for entry in self._entries.of(view)]
        blocks = [block for block in self._store if view in (None, block.namespace)]
        turns: Counter[Status] = Counter()
        for root, counts in self._names.counts.items():
            if view in (None, root):
                turns += counts
        held = self._store.held_bytes(view)
        stats = Stats(
            entries=len(entries),
            pinned_entries=sum(entry.pinned for entry in entries),
            by_tier=dict(Counter(entry.tier for entry in entries if entry.tier)),
            ram_bytes=held.get("ram", 0),
            disk_bytes=held.get("disk", 0),
            unique_bytes=sum(block.size_bytes for block in blocks),
            logical_bytes=sum(entry.size_bytes for entry in entries),
            hits=turns["hit"],
            partial_hits=turns["partial_hit"],
            misses=turns["miss"],
            evictions=self._store.evictions(view),
        )
        if view is None:
            self._add_totals(stats)
        return stats

    def _add_totals(self, stats: Stats) -> None:
        stats.ram_limit_bytes = self._store.tiers[0].limit_bytes
        stats.computed_tokens = self._device.counts.computed_tokens
        stats.reused_tokens = self._device.counts.reused_tokens
        stats.disk_state = self.disk_state
        if disk := self._store.tier("disk"):
            stats.disk_limit_bytes = disk.limit_bytes
            stats.disk_state = disk.state
            stats.disk_queued_bytes = disk.pending_bytes
            stats.disk_written_bytes = disk.counts.written_bytes
            stats.disk_read_bytes = disk.counts.read_bytes
            stats.corrupt_blocks = disk.counts.corrupt_blocks
