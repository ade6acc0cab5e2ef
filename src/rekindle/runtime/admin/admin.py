"""Answers admin requests: questions about the cache and changes to it.

A tenant sees its own entries. An admin sees the entries of all tenants.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from rekindle.errors import BadRequest, CacheKeyNotFound, NotFound
from rekindle.kvcache.block import PrefixHandle
from rekindle.kvcache.entries.entry import Draft, Entry
from rekindle.protocol import admin as ops
from rekindle.protocol.events import Reason
from rekindle.runtime.admin.cache_info import CacheInfo, View
from rekindle.runtime.admin.state_transfer import Offload, StateTransfer
from rekindle.runtime.encode.input_processor import InputProcessor
from rekindle.runtime.encode.request import EncodedPrompt
from rekindle.runtime.model_process import PIECE_ENTRIES, Pieces
from rekindle.runtime.reuse.admission import Planner
from rekindle.runtime.reuse.report import (
    ReuseInputs,
    changed_at,
    classify,
    compare,
    first_message_tokens,
)
from rekindle.runtime.reuse.sessions import MESSAGE, NUMBER, SESSION, Pins
from rekindle.runtime.storage.storage import Storage

Reply = Callable[[ops.AdminResult], None]
Removal = ops.DeleteEntry | ops.RemoveSession | ops.RemoveOld | ops.CollectExpired


class Admin:
    """Called by the engine's thread.

    Documents and state files always belong to the caller: an admin cannot read those of others.
    """

    def __init__(
        self,
        storage: Storage,
        input_processor: InputProcessor,
        pins: Pins,
        offload: Offload,
        planner: Planner,
        cache_info: CacheInfo,
        state_transfer: StateTransfer,
    ) -> None:
        self._entries = storage.entries
        self._store = storage.store
        self._disk = storage.disk
        self._input_processor = input_processor
        self._pins = pins
        self._offload = offload
        self._planner = planner
        self._cache_info = cache_info
        self._state_transfer = state_transfer

    def answer(  # noqa: C901 -- one case per operation
        self, request: ops.AdminRequest, prompt: EncodedPrompt | None, reply: Reply
    ) -> Pieces[None]:
        """Reply at the end, or when the disk has done its part; raises a ServerError instead.

        Yields between two pieces of work.
        """
        own = self._input_processor.namespace(request.salt)
        view = None if request.admin else own
        match request.op:
            case ops.ListEntries() as op:
                reply((yield from self._cache_info.page(op, view, own)))
            case ops.GetStats() as op:
                reply((yield from self._cache_info.stats(op, view)))
            case ops.ShowEntry(key):
                reply(self._cache_info.info_with_preview(self._find(view, key), own))
            case ops.Flush(key):
                self._flush(view, key, reply)
            case ops.PinEntry(key, pinned):
                self._pin(self._find(view, key), reply, pinned=pinned)
            case ops.GetDocument(key):
                reply(ops.Document(key, self._document(own, key)))
            case ops.StoreDocument() as op:
                self._store_document(op, own, reply)
            case ops.ExportState(key, folder):
                entry = self._find(own, key)
                reply((yield from self._state_transfer.save(entry, Path(folder))))
            case ops.ImportState() as op:
                yield from self._import(op, own, reply)
            case ops.Validate() as op:
                assert prompt is not None, "an encoder thread encodes the prompt first"
                reply(self._validate(op, own, prompt))
            case ops.IndexPrompt() as op:
                assert prompt is not None, "an encoder thread encodes the prompt first"
                self._index(op, own, prompt, reply)
            case ops.Tokenize() | ops.Detokenize():
                raise AssertionError("an encoder thread answers it")
            case op:
                removed = yield from self._remove(op, view, own)
                self._when_durable(lambda durable: reply(replace(removed, durable=durable)))

    def _find(self, view: View, key: str) -> Entry:
        """Raises CacheKeyNotFound, also for the key of another tenant."""
        entry = self._entries.by_key(view, key)
        if entry is None:
            raise CacheKeyNotFound
        return entry

    def _when_durable(self, then: Callable[[bool], None]) -> None:
        """Call back when all changes survive a crash, or with False if the disk failed to write
        them. In memory they apply either way."""
        self._store.tiers.flush(then)

    def _reply_when_durable(self, entry: Entry, reply: Reply) -> None:
        self._when_durable(
            lambda durable: reply(replace(self._cache_info.info(entry), durable=durable))
        )

    def _remove(self, op: Removal, view: View, own: bytes) -> Pieces[ops.Removed]:
        entries, remove = self._entries, self._entries.remove
        match op:
            case ops.DeleteEntry(key):
                return _removing([self._find(view, key)], remove)
            case ops.RemoveSession(name):
                return _removing(self._of_session(own, name), remove)
            case ops.CollectExpired():
                return _removing(entries.index.of(view), entries.expire)
            case ops.RemoveOld(seconds):
                return _removing(
                    entries.index.of(view),
                    lambda entry: remove(entry) if entries.is_older(entry, seconds) else None,
                )

    def _of_session(self, own: bytes, name: int | str) -> list[Entry]:
        kinds = (NUMBER,) if isinstance(name, int) else (SESSION, MESSAGE)
        named = {self._entries.by_name(own, (kind, str(name))) for kind in kinds}
        found = [entry for entry in named if entry is not None]
        if not found:
            raise NotFound(
                "No such session. GET /v1/internal/model/kv_cache/info lists all sessions.",
                param="session_id",
            )
        return found

    def _pin(self, entry: Entry, reply: Reply, *, pinned: bool) -> None:
        if pinned and not entry.pinned:
            self._pins.check(entry)
            self._entries.pin(entry)
            self._write(entry)
        elif not pinned:
            self._entries.unpin(entry)
        self._reply_when_durable(entry, reply)

    def _write(self, entry: Entry) -> None:
        """Write all blocks of an entry to the lower tiers, unless it is for memory only."""
        if entry.block is not None and entry.durable:
            self._store.write_back.write_chain(entry.block)

    def _flush(self, view: View, key: str, reply: Reply) -> None:
        """Reply when the entry's state is stored as safely as this server can."""
        # Accept an expired entry: the work before the flush may have taken longer than its TTL.
        entry = self._entries.index.by_key(view, key)
        if entry is None:
            raise CacheKeyNotFound

        def write() -> None:
            self._write(entry)
            self._reply_when_durable(entry, reply)

        self._offload(entry, write)

    def _index(self, op: ops.IndexPrompt, own: bytes, encoded: EncodedPrompt, reply: Reply) -> None:
        """Create an entry for a prompt that has not been computed yet."""
        prompt = encoded.prompt
        if op.prepare.pinned:
            self._pins.check(PrefixHandle(own, prompt.tokens))
        entry = self._entries.remember(
            Draft(
                namespace=own,
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
            raise BadRequest("the prompt is too long to be stored", param="messages")
        self._reply_when_durable(entry, reply)

    def _import(self, op: ops.ImportState, own: bytes, reply: Reply) -> Pieces[None]:
        names = ((SESSION, op.session_id),) if op.session_id is not None else ()
        entry = yield from self._state_transfer.load(Path(op.path), own, names)
        self._reply_when_durable(entry, reply)

    def _document(self, own: bytes, key: str) -> bytes:
        document = self._find(own, key).document
        if not document:
            raise CacheKeyNotFound
        return document

    def _store_document(self, op: ops.StoreDocument, own: bytes, reply: Reply) -> None:
        entry = self._entries.by_key(own, op.key) or self._entries.remember(
            Draft(namespace=own, key=op.key, keyed=True, ttl_s=op.ttl_s, is_computed=False)
        )
        if entry is None or not self._entries.store(entry, op.content):
            reply(ops.DocumentStored(kept=False, durable=False))
        elif self._disk is None:
            reply(ops.DocumentStored(kept=True, durable=False))
        else:
            self._disk.commit(lambda durable: reply(ops.DocumentStored(kept=True, durable=durable)))

    def _validate(self, op: ops.Validate, own: bytes, encoded: EncodedPrompt) -> ops.Validation:
        """Predict whether a request would hit an entry. Nothing is changed or counted."""
        entry = self._entries.by_key(own, op.cache_key)
        if entry is None:
            expired = self._entries.has_expired(own, op.cache_key)
            reason = Reason.EXPIRED if expired else Reason.CACHE_KEY_NOT_FOUND
            return ops.Validation(
                status="miss", reusable_tokens=0, invalidated_at=None, reason=reason
            )
        prompt = encoded.prompt
        named = compare(entry, prompt, encoded.hashes)
        usable = prompt.tokens[: prompt.tokens.whole_media(len(prompt.tokens) - 1)]
        is_default = entry.namespace == own
        match = self._planner.match(entry.namespace, usable, is_default=is_default)
        found = self._planner.reusable_tokens(entry.namespace, usable, is_default=is_default)
        reusable = min(found, named.common_tokens)
        outcome = classify(
            ReuseInputs(
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
        return ops.Validation(
            status=outcome.status,
            reusable_tokens=reusable,
            invalidated_at=named.changed,
            reason=outcome.reason,
            diverged_at=named.diverged_at,
        )


def _removing(entries: list[Entry], remove: Callable[[Entry], int | None]) -> Pieces[ops.Removed]:
    """Offer each entry to `remove`, which returns the freed bytes, or None to keep the entry."""
    removed = ops.Removed(0, 0)
    for number, entry in enumerate(entries, start=1):
        freed_bytes = remove(entry) if entry.place else None  # skip entries already removed
        if freed_bytes is not None:
            removed.entries += 1
            removed.freed_bytes += freed_bytes
        if freed_bytes is not None or number % PIECE_ENTRIES == 0:
            yield
    return removed
