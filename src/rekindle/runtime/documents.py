"""What clients store on purpose: documents of their dialect, each kept with an entry."""

from __future__ import annotations

from collections.abc import Callable

from rekindle.errors import CacheKeyNotFound
from rekindle.kvcache.entries import Draft
from rekindle.protocol.admin import (
    AdminResult,
    Document,
    DocumentStored,
    GetDocument,
    StoreDocument,
)
from rekindle.runtime.storage import Storage

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
