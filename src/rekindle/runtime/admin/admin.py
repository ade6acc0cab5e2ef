"""Questions about the cache and changes to it, as one tenant sees it or as the admin does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from rekindle.errors import BadRequest, CacheKeyNotFound, NotFound
from rekindle.kvcache.block import PrefixHandle
from rekindle.kvcache.entries.entries import Draft, Entry
from rekindle.protocol.admin import (
    AdminRequest,
    AdminResult,
    CollectExpired,
    DeleteEntry,
    Detokenize,
    Document,
    DocumentStored,
    ExportState,
    Flush,
    GetDocument,
    GetStats,
    ImportState,
    IndexPrompt,
    ListEntries,
    PinEntry,
    Removed,
    RemoveOld,
    RemoveSession,
    ShowEntry,
    StoreDocument,
    Tokenize,
    Validate,
    Validation,
)
from rekindle.protocol.events import Reason
from rekindle.runtime.admin.cache_info import CacheInfo, View
from rekindle.runtime.admin.state_transfer import StateTransfer
from rekindle.runtime.background import PIECE_ENTRIES, Pieces
from rekindle.runtime.device.kv_manager import KvManager
from rekindle.runtime.encode.input_processor import InputProcessor
from rekindle.runtime.encode.request import EncodedPrompt
from rekindle.runtime.reuse.planner import Planner
from rekindle.runtime.reuse.report import (
    ReuseInputs,
    changed_at,
    classify,
    compare,
    first_message_tokens,
)
from rekindle.runtime.reuse.sessions import MESSAGE, NUMBER, SESSION, Pins
from rekindle.runtime.storage.storage import Storage

# ----------------------------------------------------------------------
# What clients store on purpose: documents of their dialect, each kept with an entry.

Reply = Callable[[AdminResult], None]


class Documents:
    """Always the caller's own: what others wrote is not for the admin. Called by the engine's
    thread."""

    def __init__(self, storage: Storage) -> None:
        self._entries = storage.entries
        self._disk = storage.disk

    def answer(self, op: StoreDocument | GetDocument, namespace: bytes, reply: Reply) -> None:
        """Reply when the disk has done what was asked; raises CacheKeyNotFound."""
        if isinstance(op, GetDocument):
            reply(Document(op.key, self._read(namespace, op.key)))
            return
        if not self._store(op, namespace):
            reply(DocumentStored(kept=False, durable=False))
        elif self._disk is None:
            reply(DocumentStored(kept=True, durable=False))
        else:
            self._disk.commit(lambda durable: reply(DocumentStored(kept=True, durable=durable)))

    def _store(self, op: StoreDocument, namespace: bytes) -> bool:
        entry = self._entries.by_key(namespace, op.key) or self._entries.remember(
            Draft(namespace=namespace, key=op.key, keyed=True, ttl_s=op.ttl_s, is_computed=False)
        )
        return entry is not None and self._entries.store(entry, op.content)

    def _read(self, namespace: bytes, key: str) -> bytes:
        entry = self._entries.by_key(namespace, key)
        if entry is None or not entry.document:
            raise CacheKeyNotFound
        return entry.document


class Admin:
    """Called by the engine's thread."""

    def __init__(
        self,
        storage: Storage,
        input_processor: InputProcessor,
        pins: Pins,
        kv: KvManager,
        planner: Planner,
        cache_info: CacheInfo,
        state_transfer: StateTransfer,
    ) -> None:
        self._entries = storage.entries
        self._store = storage.store
        self._input_processor = input_processor
        self._pins = pins
        self._kv = kv
        self._planner = planner
        self._cache_info = cache_info
        self._state_transfer = state_transfer
        self._documents = Documents(storage)

    def answer(
        self, request: AdminRequest, prompt: EncodedPrompt | None, reply: Reply
    ) -> Pieces[None]:
        """Reply in the end, or when the disk has done what was asked; raises a ServerError
        instead. Yields between two pieces of work."""
        namespace = self._input_processor.namespace(request.salt)
        view = None if request.admin else namespace
        match request.op:
            case ListEntries() as op:
                reply((yield from self._cache_info.page(op, view, namespace)))
            case GetStats() as op:
                reply((yield from self._cache_info.stats(op, view)))
            case ShowEntry(key):
                reply(self._cache_info.seen(self._find(view, key), namespace))
            case Flush(key):
                self._flush(view, key, reply)
            case PinEntry(key, pinned):
                self._pin(self._find(view, key), reply, pinned=pinned)
            case StoreDocument() | GetDocument() as op:
                self._documents.answer(op, namespace, reply)
            case ExportState() | ImportState() as op:
                yield from self._transfer(op, namespace, reply)
            case Validate() | IndexPrompt() as op:
                assert prompt is not None, "its prompt is encoded first"
                self._answer_about(op, namespace, prompt, reply)
            case Tokenize() | Detokenize():
                raise AssertionError("an encoder thread answers it")
            case op:
                removed = yield from self._remove(op, view, namespace)
                self._when_durable(lambda durable: reply(replace(removed, durable=durable)))

    def _find(self, view: View, key: str) -> Entry:
        """The entry, or CacheKeyNotFound: another tenant's is as unknown as any."""
        entry = self._entries.by_key(view, key)
        if entry is None:
            raise CacheKeyNotFound
        return entry

    def _named(self, own: bytes, name: int | str) -> list[Entry]:
        kinds = (NUMBER,) if isinstance(name, int) else (SESSION, MESSAGE)
        named = {self._entries.by_name(own, (kind, str(name))) for kind in kinds}
        found = [entry for entry in named if entry is not None]
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
        self._when_durable(
            lambda durable: reply(replace(self._cache_info.info(entry), durable=durable))
        )

    def _remove(
        self, op: DeleteEntry | RemoveSession | RemoveOld | CollectExpired, view: View, own: bytes
    ) -> Pieces[Removed]:
        remove, entries = self._entries.remove, self._entries
        match op:
            case DeleteEntry(key):
                return (yield from _removing([self._find(view, key)], remove))
            case RemoveSession(name):
                return (yield from _removing(self._named(own, name), remove))
            case CollectExpired():
                return (yield from _removing(entries.index.of(view), entries.expire))
            case RemoveOld(seconds):
                return (
                    yield from _removing(
                        entries.index.of(view),
                        lambda entry: remove(entry) if entries.is_older(entry, seconds) else None,
                    )
                )

    def _pin(self, entry: Entry, reply: Reply, *, pinned: bool) -> None:
        if pinned and not entry.pinned:
            self._pins.check(entry)
            self._entries.pin(entry)
            if entry.block is not None and entry.durable:
                self._store.write_back.write_chain(entry.block)
        elif not pinned:
            self._entries.unpin(entry)
        self._reply_when_durable(entry, reply)

    def _answer_about(
        self, op: Validate | IndexPrompt, namespace: bytes, prompt: EncodedPrompt, reply: Reply
    ) -> None:
        if isinstance(op, Validate):
            reply(self._validate(op, namespace, prompt))
        else:
            self._index(op, namespace, prompt, reply)

    def _index(
        self, op: IndexPrompt, namespace: bytes, encoded: EncodedPrompt, reply: Reply
    ) -> None:
        """An entry that knows its tokens before any of them is computed."""
        prompt = encoded.prompt
        if op.prepare.pinned:
            self._pins.check(PrefixHandle(namespace, prompt.tokens))
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
        entry = self._entries.index.by_key(
            view, key
        )  # expired or not: the work may have outlasted it
        if entry is None:
            raise CacheKeyNotFound
        self._kv.export(entry, lambda: self._write(entry, reply))

    def _transfer(
        self, op: ExportState | ImportState, namespace: bytes, reply: Reply
    ) -> Pieces[None]:
        """Always the caller's own: what others wrote is not for the admin."""
        if isinstance(op, ExportState):
            own = self._find(namespace, op.cache_key)
            reply((yield from self._state_transfer.save(own, Path(op.folder))))
        else:
            names = ((SESSION, op.session_id),) if op.session_id is not None else ()
            loading = self._state_transfer.load(Path(op.path), namespace, names)
            self._reply_when_durable((yield from loading), reply)

    def _write(self, entry: Entry, reply: Reply) -> None:
        """Have all that is stored of an entry written, and reply then."""
        if entry.block is not None and entry.durable:
            self._store.write_back.write_chain(entry.block)
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
        usable = prompt.tokens[: prompt.tokens.whole_media(len(prompt.tokens) - 1)]
        is_default = entry.namespace == namespace
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
        return Validation(
            status=outcome.status,
            reusable_tokens=reusable,
            invalidated_at=named.changed,
            reason=outcome.reason,
            diverged_at=named.diverged_at,
        )


def _removing(entries: list[Entry], remove: Callable[[Entry], int | None]) -> Pieces[Removed]:
    """Offer each entry to `remove`, which returns the bytes freed, or None if it stays."""
    removed = Removed(0, 0)
    for number, entry in enumerate(entries, start=1):
        freed_bytes = remove(entry) if entry.place else None  # it may have gone meanwhile
        if freed_bytes is not None:
            removed.entries += 1
            removed.freed_bytes += freed_bytes
        if freed_bytes is not None or number % PIECE_ENTRIES == 0:
            yield
    return removed
