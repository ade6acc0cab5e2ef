"""Answers admin requests: questions about the cache and changes to it.

A tenant sees its own entries. An admin sees the entries of all tenants.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from rekindle.errors import BadRequest, CacheKeyNotFound, NotFound
from rekindle.kvcache.block import PrefixHandle
from rekindle.kvcache.entries.entries import Entries
from rekindle.kvcache.entries.entry import Draft, Entry, cost_bytes
from rekindle.protocol import admin as ops
from rekindle.protocol.events import Reason
from rekindle.runtime.admin.cache_info import CacheInfo, View, tenant_id
from rekindle.runtime.admin.prefix_tree import TreeView
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
    divergence,
    opening_tokens,
)
from rekindle.runtime.reuse.sessions import MESSAGE, NUMBER, OWN_KINDS, PROJECT, SESSION, Sessions
from rekindle.runtime.storage.storage import Storage

Reply = Callable[[ops.AdminResult], None]
Listing = ops.ListEntries | ops.GetStats | ops.ShowTree | ops.ListDocuments
NAME_KINDS = (PROJECT, MESSAGE, SESSION, NUMBER)  # names that serve as a key, in this order
Removal = (
    ops.DeleteEntry | ops.RemoveSession | ops.RemoveOld | ops.CollectExpired | ops.RemoveTenant
)


@dataclass(frozen=True, slots=True)
class Admin:
    """Called by the engine's thread.

    Documents and state files always belong to the caller: an admin cannot read those of others.
    """

    storage: Storage
    input_processor: InputProcessor
    sessions: Sessions
    offload: Offload
    planner: Planner
    cache_info: CacheInfo
    state_transfer: StateTransfer

    def answer(  # noqa: C901 -- one case per operation
        self, request: ops.AdminRequest, prompt: EncodedPrompt | None, reply: Reply
    ) -> Pieces[None]:
        """Reply at the end, or when the disk has done its part; raises a ServerError instead.

        Yields between two pieces of work.
        """
        own = self.input_processor.namespace(request.salt)
        view = None if request.admin else own
        groups = self.input_processor.group_namespaces(request.groups)
        match request.op:
            case ops.ListEntries() | ops.GetStats() | ops.ShowTree() | ops.ListDocuments() as op:
                reply((yield from self._list(op, view, own)))
            case ops.ShowBranch(key):
                reply(self._tree.text(key, own))
            case ops.ShowEntry(key):
                reply(self._show(self._find(view, own, key, groups), view, own))
            case ops.Flush(key):
                self._flush(view, key, reply)
            case ops.PinEntry(key, pinned):
                self._pin(self._find_to_change(view, own, key), reply, pinned=pinned)
            case ops.GetDocument(key):
                reply(ops.Document(key, self._document(own, key)))
            case ops.StoreDocument() as op:
                self._store_document(op, own, reply)
            case ops.ExportState(key, folder):
                entry = self._find_to_change(own, own, key)
                reply((yield from self.state_transfer.save(entry, Path(folder))))
            case ops.ImportState() as op:
                yield from self._import(op, own, reply)
            case ops.Validate() as op:
                assert prompt is not None, "an encoder thread encodes the prompt first"
                reply(self._validate(op, own, groups, prompt))
            case ops.IndexPrompt() as op:
                assert prompt is not None, "an encoder thread encodes the prompt first"
                self._index(op, own, prompt, reply)
            case ops.Tokenize() | ops.Detokenize():
                raise AssertionError("an encoder thread answers it")
            case ops.NameTenants(salts, names):
                reply(self._tenant_ids(salts, names))
            case op:
                removed = yield from self._remove(op, view, own)
                self._when_durable(lambda durable: reply(replace(removed, durable=durable)))

    def _list(self, op: Listing, view: View, own: bytes) -> Pieces[ops.AdminResult]:
        match op:
            case ops.ListEntries():
                return (yield from self.cache_info.page(op, view, own))
            case ops.GetStats():
                return (yield from self.cache_info.stats(op, view))
            case ops.ShowTree():
                return (yield from self._tree.show(op, view))
            case ops.ListDocuments(prefix):
                return (yield from self._documents(own, prefix))

    @property
    def _tree(self) -> TreeView:
        return TreeView(self.storage.store, self.input_processor.tokenizer)

    def _find(self, view: View, own: bytes, key: str, groups: tuple[bytes, ...] = ()) -> Entry:
        """Find an entry by its key or by a name: of the caller, or one that the operator shares.

        Raises CacheKeyNotFound, also for the key of another tenant.
        """
        entry = self.storage.entries.by_key(view, key) or self.sessions.keys.find(
            own, key, NAME_KINDS, groups
        )
        if entry is None:
            raise CacheKeyNotFound
        return entry

    def _find_to_change(self, view: View, own: bytes, key: str) -> Entry:
        """Find an entry like `_find`, except that a tenant cannot change a shared one."""
        entry = self._find(view, own, key)
        if view not in (None, entry.tenant):
            raise CacheKeyNotFound
        return entry

    def _show(self, entry: Entry, view: View, own: bytes) -> ops.EntryInfo:
        info = self.cache_info.info_with_preview(entry, own)
        if view in (None, entry.tenant):
            return info
        # A tenant must not see when others use a shared entry.
        hidden = {"hit_count": 0, "last_used": info.created_at, "expires_at": None}
        return replace(info, **hidden, lru_position=0)

    def _when_durable(self, then: Callable[[bool], None]) -> None:
        """Call back when all changes survive a crash, or with False if the disk failed to write
        them. In memory they apply either way."""
        self.storage.store.tiers.flush(then)

    def _reply_when_durable(self, entry: Entry, reply: Reply) -> None:
        self._when_durable(
            lambda durable: reply(replace(self.cache_info.info(entry), durable=durable))
        )

    def _remove(self, op: Removal, view: View, own: bytes) -> Pieces[ops.Removed]:
        entries, remove = self.storage.entries, self.storage.entries.remove
        match op:
            case ops.RemoveTenant(salt):
                return self._remove_tenant(salt)
            case ops.DeleteEntry(key):
                return _removing([self._find_to_change(view, own, key)], remove)
            case ops.RemoveSession(name):
                return _removing(self._of_session(own, name), remove)
            case ops.CollectExpired():
                return _collecting(entries, view)
            case ops.RemoveOld(seconds):
                return _removing(
                    entries.index.of(view),
                    lambda entry: remove(entry) if self._is_old_session(entry, seconds) else None,
                )

    def _tenant_ids(self, salts: list[bytes], groups: list[str]) -> ops.TenantIds:
        processor = self.input_processor
        return ops.TenantIds(
            tenants=[tenant_id(processor.namespace(salt)) for salt in salts],
            shared=tenant_id(processor.shared_namespace),
            groups=[tenant_id(each) for each in processor.group_namespaces(groups)],
        )

    def _remove_tenant(self, salt: bytes) -> Pieces[ops.Removed]:
        """Delete all entries of a tenant, with their state in every tier, their documents and their
        images, and what is counted or remembered in memory. Its turns were cancelled before."""
        own, entries = self.input_processor.namespace(salt), self.storage.entries
        removed = yield from _removing(entries.index.of(own), entries.remove)
        entries.forget_tenant(own)
        self.cache_info.forget_tenant(own)
        self.input_processor.forget_tenant(salt)
        return removed

    def _is_old_session(self, entry: Entry, seconds: float) -> bool:
        return _is_session(entry) and self.storage.entries.is_older(entry, seconds)

    def _of_session(self, own: bytes, name: int | str) -> list[Entry]:
        kinds = (NUMBER,) if isinstance(name, int) else (SESSION, MESSAGE)
        named = {self.storage.entries.by_name(own, (kind, str(name))) for kind in kinds}
        found = [entry for entry in named if entry is not None and _is_session(entry)]
        if not found:
            raise NotFound(
                "No such session. GET /v1/internal/model/kv_cache/info lists all sessions.",
                param="session_id",
            )
        return found

    def _pin(self, entry: Entry, reply: Reply, *, pinned: bool) -> None:
        if pinned and not entry.is_pinned_for_good:
            self.sessions.pins.check(entry, 0 if entry.pinned else entry.cost_bytes)
            self.storage.entries.pin(entry)
            self._write(entry)
        elif not pinned:
            self.storage.entries.unpin(entry)
        self._reply_when_durable(entry, reply)

    def _write(self, entry: Entry) -> None:
        """Write all blocks of an entry to the lower tiers, unless it is for memory only."""
        if entry.block is not None and entry.durable:
            self.storage.store.write_back.write_chain(entry.block)

    def _flush(self, view: View, key: str, reply: Reply) -> None:
        """Reply when the entry's state is stored as safely as this server can."""
        # Accept an expired entry: the work before the flush may have taken longer than its TTL.
        entry = self.storage.entries.index.by_key(view, key)
        if entry is None:
            raise CacheKeyNotFound

        def write() -> None:
            self._write(entry)
            self._reply_when_durable(entry, reply)

        self.offload(entry, write)

    def _index(self, op: ops.IndexPrompt, own: bytes, encoded: EncodedPrompt, reply: Reply) -> None:
        """Create an entry for a prompt that has not been computed yet."""
        prompt = encoded.prompt
        if op.prepare.pinned:
            self.sessions.pins.check(
                PrefixHandle(own, prompt.tokens), cost_bytes(prompt.tokens, prompt.escaped)
            )
        entry = self.storage.entries.remember(
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
        entry = yield from self.state_transfer.load(Path(op.path), own, names)
        self._reply_when_durable(entry, reply)

    def _document(self, own: bytes, key: str) -> bytes:
        entry = self.storage.entries.by_key(own, key)
        if entry is None or not entry.document:
            raise CacheKeyNotFound
        return entry.document

    def _documents(self, own: bytes, prefix: str) -> Pieces[ops.DocumentKeys]:
        found = []
        for number, entry in enumerate(self.storage.entries.of(own), start=1):
            if entry.document and entry.key.startswith(prefix) and entry.place:
                found.append((entry.created_at, entry.key))
            if number % PIECE_ENTRIES == 0:
                yield
        found.sort()
        return ops.DocumentKeys([key for _, key in found], [created_at for created_at, _ in found])

    def _store_document(self, op: ops.StoreDocument, own: bytes, reply: Reply) -> None:
        entries, disk = self.storage.entries, self.storage.disk
        known = entries.by_key(own, op.key)
        entry = known or entries.remember(
            Draft(namespace=own, key=op.key, keyed=True, ttl_s=op.ttl_s, is_computed=False)
        )
        if entry is None or not entries.store(entry, op.content):
            if entry is not None and known is None and entry.place:
                entries.forget(entry)
            reply(ops.DocumentStored(kept=False, durable=False))
        elif disk is None:  # an operator who turned it off expects nothing after a restart
            is_off = self.storage.no_disk_reason == "off"
            reply(ops.DocumentStored(kept=True, durable=is_off))
        else:
            disk.commit(
                op.key, lambda durable: reply(ops.DocumentStored(kept=True, durable=durable))
            )

    def _validate(
        self, op: ops.Validate, own: bytes, groups: tuple[bytes, ...], encoded: EncodedPrompt
    ) -> ops.Validation:
        """Predict whether a request would hit an entry. Nothing is changed or counted."""
        entries, prompt, hashes = self.storage.entries, encoded.prompt, encoded.hashes
        entry = self.sessions.keys.find(own, op.cache_key, groups=groups)
        problem, nearest = None, None
        if entry is None:
            expired = entries.has_expired(own, op.cache_key)
            problem = Reason.EXPIRED if expired else Reason.CACHE_KEY_NOT_FOUND
            nearest = entries.index.nearest(own, prompt.escaped)
        named = compare(entry, prompt, hashes) if entry else None
        usable = prompt.tokens[: prompt.tokens.whole_media(len(prompt.tokens) - 1)]
        is_default = entry is None or entry.namespace == entry.tenant
        namespace = own if entry is None or is_default else entry.namespace
        match = self.planner.match(namespace, usable, groups, is_default=is_default)
        reusable = self.planner.reusable_tokens(namespace, usable, groups, is_default=is_default)
        outcome = classify(
            ReuseInputs(
                prompt_tokens=len(prompt.tokens),
                opening_tokens=opening_tokens(prompt, op.tools, self.input_processor.tokenizer),
                reused_tokens=reusable,
                matched_tokens=match.tokens,
                diverged=match.diverged,
                changed=changed_at(prompt, match.tokens),
                can_truncate=self.planner.can_truncate,
                problem=problem,
                named=named,
                nearest=compare(nearest, prompt, hashes) if nearest and hashes else None,
            )
        )
        return ops.Validation(
            status=outcome.status,
            reusable_tokens=reusable,
            invalidated_at=named.changed if named else None,
            reason=outcome.reason,
            diverged_at=divergence(entry, prompt, named) if entry and named else None,
        )


def _is_session(entry: Entry) -> bool:
    """Whether it is listed as a session. A stored response may be named after its conversation, but
    only its own API deletes it."""
    return not entry.document and any(kind in OWN_KINDS for kind, _ in entry.names)


def _collecting(entries: Entries, view: View) -> Pieces[ops.Removed]:
    """Delete what has expired. Only entries in the view are reported."""
    removed = ops.Removed(0, 0)
    for number, (entry, freed_bytes) in enumerate(entries.expire_due(), start=1):
        if freed_bytes is not None and view in (None, entry.tenant):
            removed.entries += 1
            removed.freed_bytes += freed_bytes
        if freed_bytes is not None or number % PIECE_ENTRIES == 0:
            yield
    return removed


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
