"""A desk over the memory of a runtime: what opens a cache folder, tends it and complains of it."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from rekindle.chat.encode import Encoder
from rekindle.kvcache.disk.files import Calls
from rekindle.kvcache.key import namespace
from rekindle.kvcache.tiers.base import TierEvent
from rekindle.kvcache.tiers.disk import DiskTier
from rekindle.protocol.admin import GetStats, Stats
from rekindle.protocol.frames import LogLine
from rekindle.protocol.requests import LoadModel
from rekindle.protocol.settings import RuntimeSettings
from rekindle.runtime.admin import Queries
from rekindle.runtime.kv_manager import Device
from rekindle.runtime.scheduler import Scheduler
from rekindle.runtime.sessions import Sessions
from rekindle.runtime.storage import Memory
from tests.stress.trouble import block_files_with
from tests.support.fake import FakeEngine
from tests.support.harness import PATIENCE_S, SHARED_SALT, Desk, NumberTokenizer, Reply


def load(cache_dir: Path, **more: Any) -> LoadModel:
    limits = {"ram_cache": 64 << 20, "disk_cache": 64 << 20, "disk_floor": 0, **more}
    settings = RuntimeSettings(
        parallel=4, kv_fraction=0.5, threads=1, cache_dir=cache_dir, **limits
    )
    return LoadModel(path="", settings=settings)


class Office(Desk):
    """Composed as the worker composes it; `notes` is what the server's log would say."""

    def __init__(self, engine: FakeEngine, order: LoadModel, calls: Calls | None = None) -> None:
        self.engine = engine
        self.abilities = engine.abilities
        self._news: SimpleQueue[TierEvent] = SimpleQueue()
        self.notes: list[LogLine] = []
        self.memory = Memory(order, self.capabilities, self._news.put, self.notes.append)
        self.store, self.entries = self.memory.store, self.memory.entries
        self.disk, self.clock = self.memory.disk, self.memory.clock
        if calls is not None and self.disk is not None:
            self.disk.folder.block_files = block_files_with(self.disk.folder.path, calls)
        self.logs: list[str] = []
        self._tokenizer = NumberTokenizer()
        self._end_tokens = frozenset()
        self.names = Sessions(
            self.entries, self.store, Encoder(self._tokenizer, None), self.logs.append
        )
        shared = self.root(SHARED_SALT)
        self.device = Device(
            engine, self.store, self.names.explain, resident_tokens=0, shared=shared
        )
        self.entries.on_remove = self.device.forget
        self.scheduler = Scheduler(
            engine, self.device, self._emit, self.names.remember, parallel=order.settings.parallel
        )
        self.queries = Queries(self.entries, self.store, self.device, self.names, self.clock)
        self.queries.disk_state = self.memory.trouble
        self.replies = {}
        self._ids = itertools.count(1)

    def root(self, salt: bytes = b"") -> bytes:
        secret = self.memory.secret
        return namespace(
            self.capabilities.kv_layout.fingerprint, salt, self.capabilities.block_tokens, secret
        )

    def hear(self, *, wait: bool = False) -> None:
        with contextlib.suppress(Empty):
            while True:
                news = self._news.get(timeout=PATIENCE_S) if wait else self._news.get_nowait()
                self.memory.on_event(news)
                wait = False

    def close(self) -> None:
        self.scheduler.stop()
        self.device.keep_everything()
        self.memory.close()

    # -- what a test wants to know -------------------------------------------------------------

    @property
    def tier(self) -> DiskTier:
        assert self.disk is not None
        return self.disk

    @property
    def warnings(self) -> list[str]:
        return [note.text for note in self.notes if note.level == "warning"]

    @property
    def disk_state(self) -> str:
        """As GET /v1/cache/stats tells an admin."""
        stats = self.queries.answer(GetStats(), self.root(), admin=True)
        assert isinstance(stats, Stats)
        return stats.disk_state

    @property
    def stored_blocks(self) -> int:
        return sum(block.stored for block in self.store)

    def used_bytes_hold(self) -> bool:
        """Whether RAM and disk are within their budgets, as they count themselves."""
        ram = self.store.tiers[0].used_bytes <= self.store.tiers[0].limit_bytes
        return ram and (self.disk is None or self.disk.used_bytes <= self.disk.limit_bytes)

    def converse(self, seed: int, turns: int = 2) -> Reply:
        """A conversation of its own whose every answer is the cold one."""
        tokens = [seed % 1000, seed // 1000, *range(200, 238)]
        for _ in range(turns):
            reply = self.ask(tokens)
            assert reply.tokens == Desk(FakeEngine()).ask(tokens).tokens
            tokens = [*tokens, *reply.tokens, 7]
        return reply
