"""A test harness over the real storage of a runtime."""

from __future__ import annotations

import itertools
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from rekindle.kvcache.disk.files import Calls
from rekindle.kvcache.tiers.disk import DiskTier
from rekindle.protocol.admin import GetStats, Stats
from rekindle.protocol.frames import LogLine
from rekindle.protocol.requests import LoadModel
from rekindle.protocol.settings import RuntimeSettings
from rekindle.runtime.storage.opening import choose_budgets, open_storage
from rekindle.runtime.storage.storage import StorageEvent
from tests.stress.trouble import block_files_with
from tests.support.fake import FakeEngine
from tests.support.harness import Reply, RuntimeHarness


def load(cache_dir: Path, **more: Any) -> LoadModel:
    limits = {"ram_cache": 64 << 20, "disk_cache": 64 << 20, "disk_floor": 0, **more}
    settings = RuntimeSettings(
        parallel=4, kv_fraction=0.5, threads=1, cache_dir=cache_dir, **limits
    )
    return LoadModel(path="", settings=settings)


class StorageHarness(RuntimeHarness):
    """Has the budgets and the folder of a real process. Idle state is stored immediately."""

    def __init__(self, engine: FakeEngine, order: LoadModel, calls: Calls | None = None) -> None:
        self.engine = engine
        self._is_undisturbed = lambda: False
        self.capabilities = engine.capabilities
        self._events: SimpleQueue[StorageEvent] = SimpleQueue()
        self.log_lines: list[LogLine] = []
        self.replies: dict[int, Reply] = {}
        self._ids = itertools.count(1)
        storage = open_storage(
            order,
            choose_budgets(order),
            self.capabilities,
            self._events.put,
            self.log_lines.append,
            on_remove=lambda entry: self.runtime.remove(entry),
            on_forget=lambda entry: self.runtime.kv.forget(entry),
        )
        self.take_storage(storage, idle_tokens=0)
        self.settle()
        if calls is not None and storage.disk is not None:
            folder = storage.disk.folder
            folder.block_files = block_files_with(folder.path, calls)

    def settle(self) -> None:
        """Wait until the folder has been read, or is known to be unreachable."""
        while not self.storage.is_settled:
            self.take_events(wait=True)

    @property
    def tier(self) -> DiskTier:
        assert self.disk is not None
        return self.disk

    @property
    def warnings(self) -> list[str]:
        return [line.text for line in self.log_lines if line.level == "warning"]

    @property
    def disk_state(self) -> str:
        """The disk state as GET /v1/cache/stats reports it to an admin."""
        stats = self.administer(GetStats(), admin=True)
        assert isinstance(stats, Stats)
        return stats.disk_state

    @property
    def held(self) -> int:
        """The blocks that are known to be on disk."""
        return sum(self.tier.holds(block) for block in self.store)

    @property
    def stored_blocks(self) -> int:
        return sum(block.stored for block in self.store)

    def used_bytes_hold(self) -> bool:
        """Whether RAM and disk are within their budgets, by their own counts."""
        ram = self.store.tiers[0].budget.used_bytes <= self.store.tiers[0].budget.limit_bytes
        return ram and (
            self.disk is None or self.disk.budget.used_bytes <= self.disk.budget.limit_bytes
        )

    def converse(self, seed: int, turns: int = 2) -> Reply:
        """Hold a new conversation in which every answer equals the cold one."""
        tokens = [seed % 1000, seed // 1000, *range(200, 238)]
        for _ in range(turns):
            reply = self.ask(tokens)
            assert reply.tokens == RuntimeHarness(FakeEngine()).ask(tokens).tokens
            tokens = [*tokens, *reply.tokens, 7]
        return reply
