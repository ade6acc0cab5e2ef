"""Measures how fast stored state is restored, compared with plain copies of the same bytes."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np

from rekindle.engine.base import Blob, EngineOptions, Work, run_step
from rekindle.engine.llamacpp.engine import LlamaCppEngine
from rekindle.kvcache.block import Block, WriteBack, chain_key
from rekindle.kvcache.disk.folder import open_folder
from rekindle.kvcache.store import Store
from rekindle.kvcache.tiers.base import Fetch, TierEvent
from rekindle.kvcache.tiers.disk import DiskTier
from rekindle.kvcache.tiers.ram import RamTier
from rekindle.tokens import Tokens

TOKENS = 1536
ROOT = b"r" * 32
GIGA = 1e9


@dataclass(slots=True)
class Speeds:
    """GB/s of restoring and of copying the same bytes, one pair per round."""

    ours: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)

    def ratios(self) -> list[float]:
        return [one / other for one, other in zip(self.ours, self.plain, strict=True)]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def measure_speeds(model: Path, rounds: int) -> dict[str, Speeds]:
    """Measure RAM, disk, and disk with files in the page cache, in turns."""
    options = EngineOptions(path=model, parallel=1, context_tokens=2 * TOKENS, threads=2)
    engine = LlamaCppEngine(options)
    with tempfile.TemporaryDirectory(prefix="rekindle-bench-") as folder:
        bench = Bench(engine, Path(folder))
        try:
            bench.run(1)  # the first round is slow for both
            return bench.run(3 * rounds)
        finally:
            bench.close()
            engine.close()


class Bench:
    def __init__(self, engine: LlamaCppEngine, folder: Path) -> None:
        self._engine = engine
        self._events: SimpleQueue[TierEvent] = SimpleQueue()
        opened = open_folder(folder, b"bench", limit_bytes=1 << 40)
        self._disk = DiskTier(opened, self._events.put)
        self._store = Store(
            block_tokens=engine.capabilities.block_tokens, tiers=[RamTier(1 << 34), self._disk]
        )
        self._files = opened.path / "blocks"
        self._blocks = self._compute()
        self._blobs = [self._blob(block) for block in self._blocks]
        self._bytes = sum(map(len, self._blobs))
        self._room = np.ones(self._bytes, np.uint8)  # touch the pages, like the engine's memory

    def close(self) -> None:
        self._disk.close()

    def run(self, rounds: int) -> dict[str, Speeds]:
        found = {"RAM": Speeds(), "disk": Speeds(), "disk, page cache warm": Speeds()}
        for _ in range(rounds):
            self._pair(found["RAM"], self._restore_all, self._copy_all, cold=False)
            self._pair(found["disk"], self._fetch_all, self._read_all, cold=True)
            warm = found["disk, page cache warm"]
            self._pair(warm, self._fetch_all, self._read_all, cold=False)
        return found

    def _pair(
        self, speeds: Speeds, ours: Callable[[], None], plain: Callable[[], None], *, cold: bool
    ) -> None:
        for move, kept in ((ours, speeds.ours), (plain, speeds.plain)):
            if cold:
                self._forget_pages()
            started = time.perf_counter()
            move()
            kept.append(self._bytes / GIGA / (time.perf_counter() - started))

    def _compute(self) -> list[Block]:
        """Compute a real state of this many tokens, and store it in RAM and on disk."""
        engine, step = self._engine, self._engine.capabilities.block_tokens
        sequence = engine.sequences.open(exact=False)
        parent = ROOT
        for start in range(0, TOKENS, step):
            tokens = [100 + (start + n) % 1000 for n in range(step)]
            run_step(engine, [Work(sequence, tokens, None)])
            blob = engine.sequences.export(sequence, start, start + step)
            block = Tokens.of(tokens)
            soon = WriteBack.SOON
            self._store.put(ROOT, parent, block, blob, exact=False, write_back=soon)
            parent = chain_key(parent, block)
        engine.sequences.close(sequence)
        self._flush()
        return list(self._store)

    def _flush(self) -> None:
        done: list[bool] = []
        self._disk.flush(done.append)
        while not done:
            self._store.on_event(self._events.get())

    def _blob(self, block: Block) -> Blob:
        blob = self._store.get(block)
        assert blob is not None
        return blob

    def _forget_pages(self) -> None:
        for path in self._files.iterdir():
            handle = os.open(path, os.O_RDONLY)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)

    def _restore(self, blobs: list[Blob]) -> None:
        sequence = self._engine.sequences.open(exact=False)
        for block, blob in zip(self._blocks, blobs, strict=True):
            self._engine.sequences.restore(sequence, blob, len(block.tokens))
        self._engine.sequences.close(sequence)

    def _restore_all(self) -> None:
        self._restore(self._blobs)

    def _copy_all(self) -> None:
        at = 0
        for blob in self._blobs:
            self._room[at : at + len(blob)] = np.frombuffer(blob, np.uint8)
            at += len(blob)

    def _fetch_all(self) -> None:
        fetch = Fetch.of(self._disk.name, self._blocks)
        self._disk.read(self._blocks, fetch)
        while not fetch.is_done:
            self._store.on_event(self._events.get())
        self._restore([fetch.records[block.key].blob for block in self._blocks])

    def _read_all(self) -> None:
        """Read all files into memory, as fetching does."""
        [(self._files / block.key.hex()).read_bytes() for block in self._blocks]
