"""Opens a model's folder in the background, retries if needed, and reports its blocks in chunks."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from rekindle.errors import FolderLocked, RekindleError
from rekindle.kvcache.block import BlockKind
from rekindle.kvcache.codec import record_bytes
from rekindle.kvcache.disk.entry_table import BlockRow, EntryRow
from rekindle.kvcache.disk.folder import Folder
from rekindle.kvcache.tiers.base import (
    BlocksFound,
    OnEvent,
    StoredBlock,
    TierOpened,
    TierUnavailable,
)
from rekindle.tokens import Tokens

LOCKED_S = 2.0  # time between two tries while another process owns the folder
FAILING_S = 60.0  # time between two tries after another error
CHUNK_BLOCKS = 256  # loading a chunk takes a few milliseconds between two steps


class Opening:
    """A thread that reports `TierUnavailable` or `TierOpened`, and then `BlocksFound`."""

    def __init__(self, tier: str, open_: Callable[[], Folder], on_event: OnEvent) -> None:
        self.folder: Folder | None = None  # set before `TierOpened`
        self.entries: list[EntryRow] = []
        self._tier = tier
        self._open = open_
        self._on_event = on_event
        self._closing = threading.Event()
        self._room = threading.Semaphore(2)  # chunks that wait for the engine's thread
        self._thread = threading.Thread(target=self._run, name="disk-opener", daemon=True)
        self._thread.start()

    def acknowledge(self) -> None:
        """The last chunk has been loaded."""
        self._room.release()

    def close(self) -> None:
        """Stop opening."""
        self._closing.set()
        self._room.release()
        self._thread.join()

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                folder = self._open()
                blocks, self.entries = folder.take_listed()
            except FolderLocked as error:
                self._on_event(TierUnavailable(self._tier, "locked", str(error)))
                self._closing.wait(LOCKED_S)
            except (OSError, sqlite3.Error, RekindleError) as error:
                reason = getattr(error, "strerror", None) or str(error)
                self._on_event(TierUnavailable(self._tier, "failing", reason))
                self._closing.wait(FAILING_S)
            else:
                self.folder = folder
                self._on_event(TierOpened(self._tier))
                self._list(blocks)
                return

    def _list(self, rows: list[BlockRow]) -> None:
        found = stored_blocks(rows)
        while blocks := tuple(islice(found, CHUNK_BLOCKS)):
            self._room.acquire()
            if self._closing.is_set():
                return
            self._on_event(BlocksFound(self._tier, blocks))
        self._on_event(BlocksFound(self._tier, (), is_all=True))


def stored_blocks(rows: Iterable[BlockRow]) -> Iterator[StoredBlock]:
    """The blocks of an index, parents first."""
    kinds: dict[tuple[int, int], BlockKind] = {}  # shared, because there are few
    for key, parent, namespace, packed, size_bytes, bits in rows:
        state_bytes = size_bytes - record_bytes(len(packed), 0)
        kind = kinds.get((state_bytes, bits))
        if kind is None:
            kind = BlockKind(state_bytes, bool(bits & 1), bool(bits & 2))
            kinds[state_bytes, bits] = kind
        yield StoredBlock(key, parent, namespace, Tokens(packed), kind)
