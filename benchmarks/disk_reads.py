"""Measures how fast large blocks come from files in the page cache into memory for a GPU.

Prints the speed of each stage on one core. Then it prints, for each number of readers, how long
restoring a conversation takes: files of 150 MB are read in windows into used memory, verified, and
copied to a device at 38 GB/s. No model and no GPU is needed. The files take 2 GB of disk and are
removed.

    python benchmarks/disk_reads.py [--blocks 12] [--block-mb 150] [--folder FOLDER] [1 2 4 8]
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from statistics import median
from types import SimpleNamespace
from typing import Annotated, Any, cast

import numpy as np
import typer

from rekindle.engine.base import Blob, Engine, Sequence
from rekindle.kvcache.block import Block, WriteBack, chain_key
from rekindle.kvcache.codec import stripe_digest, stripes
from rekindle.kvcache.disk.folder import Folder, open_folder
from rekindle.kvcache.plan import Plan
from rekindle.kvcache.store import Store
from rekindle.kvcache.tiers.base import TierEvent
from rekindle.kvcache.tiers.disk import DiskTier
from rekindle.kvcache.tiers.ram import RamTier
from rekindle.protocol.settings import usable_cores
from rekindle.runtime.device.offload import Counts, StepBudget
from rekindle.runtime.reuse.restorer import CostGate, Restorer
from rekindle.tokens import Tokens

ROOT = b"r" * 32
SECRET = b"s" * 32
BLOCK_TOKENS = 1024
BUS_BYTES_S = 38e9
FETCHED_BLOCKS = 16  # like for a GPU
STEP_BYTES = 256 << 20
ROUNDS = 5
MEGA, GIGA = 1e6, 1e9
LONG_GB = 4.8  # size of 32k tokens of an 8B model


@dataclass(frozen=True, slots=True)
class Round:
    first_s: float  # until the first block has arrived
    all_s: float
    busy_s: float  # sum over all cores


class Bus:
    """Accepts blocks at the speed of a GPU."""

    capabilities = SimpleNamespace(can_truncate=True)

    def __init__(self) -> None:
        self.first_s = 0.0  # arrival of the first block

    def restore(self, into: Sequence, blob: Blob, tokens: int, *, resumable: bool = False) -> None:
        self.first_s = self.first_s or time.perf_counter()
        time.sleep(len(blob) / BUS_BYTES_S)


class UsedMemory:
    """Memory whose pages are already mapped, like those of a page-locked arena."""

    def __init__(self, size_bytes: int) -> None:
        self._all = np.ones(size_bytes, np.uint8).data
        self.at = 0

    def allocate(self, size_bytes: int) -> memoryview:
        self.at += size_bytes
        return self._all[self.at - size_bytes : self.at]


class Shelf:
    """A conversation on disk, and its restoration by a number of readers."""

    def __init__(self, path: Path, blocks: int, block_bytes: int) -> None:
        self.path = path
        self.size_bytes = blocks * block_bytes
        self._block_bytes = block_bytes
        self._tokens = Tokens.of(n % 1000 for n in range(blocks * BLOCK_TOKENS))
        self._memory = UsedMemory(self.size_bytes)
        self._write(blocks)

    def _open(self, readers: int) -> tuple[Store, DiskTier, SimpleQueue[TierEvent]]:
        events: SimpleQueue[TierEvent] = SimpleQueue()
        folder: Folder = open_folder(self.path, b"bench", limit_bytes=1 << 40, secret=SECRET)
        disk = DiskTier(folder, events.put, allocate=self._memory.allocate, readers=readers)
        fetch_bytes = FETCHED_BLOCKS * self._block_bytes
        store = Store(block_tokens=BLOCK_TOKENS, tiers=[RamTier(0), disk], fetch_bytes=fetch_bytes)
        store.load()
        return store, disk, events

    def _write(self, blocks: int) -> None:
        store, disk, events = self._open(1)
        state = np.random.default_rng(1).integers(0, 256, self._block_bytes, np.uint8).data
        parent = ROOT
        for number in range(blocks):
            tokens = self._tokens[number * BLOCK_TOKENS : (number + 1) * BLOCK_TOKENS]
            soon = WriteBack.SOON
            store.put(ROOT, parent, tokens, state, exact=False, write_back=soon)
            parent = chain_key(parent, tokens)
            done: list[bool] = []
            disk.flush(done.append)
            while not done:
                store.on_event(events.get())
        disk.close()

    def restore(self, readers: int) -> list[Round]:
        store, disk, events = self._open(readers)
        blocks = store.match(ROOT, self._tokens).blocks
        try:
            return [self._round(store, blocks, events) for _ in range(ROUNDS)]
        finally:
            disk.close()

    def _round(
        self, store: Store, blocks: tuple[Block, ...], events: SimpleQueue[TierEvent]
    ) -> Round:
        bus, counts, self._memory.at = Bus(), Counts(), 0
        budget = StepBudget(counts, STEP_BYTES)
        restorer = Restorer(
            cast("Engine", bus),
            store,
            counts,
            budget,
            CostGate(store.tiers),
            time.monotonic,
        )
        began_s, busy_s = time.perf_counter(), time.process_time()
        nothing: Plan[Sequence] = Plan.nothing()
        plan = replace(nothing, blocks=blocks, reused_tokens=blocks[-1].stop)
        restoration = restorer.begin(plan)
        while not restorer.advance(restoration, cast("Sequence", None)):
            if not budget.is_spent:
                store.on_event(events.get())
            budget.renew(is_shared=False)
        assert restoration.restored == len(blocks), "not all could be read"
        all_s = time.perf_counter() - began_s
        return Round(bus.first_s - began_s, all_s, time.process_time() - busy_s)


def stages(path: Path) -> dict[str, float]:
    """The speed of one core in GB/s."""
    size_bytes = path.stat().st_size
    used, handle = np.ones(size_bytes, np.uint8).data, os.open(path, os.O_RDONLY)

    def read(into: memoryview) -> None:
        for start, stripe in stripes(into):
            os.preadv(handle, [stripe], start)

    def hashed() -> None:
        for _, stripe in stripes(used):
            stripe_digest(stripe, SECRET)

    def both() -> None:
        for start, stripe in stripes(used):
            os.preadv(handle, [stripe], start)
            stripe_digest(stripe, SECRET)

    acts: dict[str, Callable[[], Any]] = {
        "read into used memory": lambda: read(used),
        "read into fresh memory": lambda: read(np.empty(size_bytes, np.uint8).data),
        "hash": hashed,
        "read and hash, stripe by stripe": both,
    }
    try:
        return {name: size_bytes / GIGA / _least_s(act) for name, act in acts.items()}
    finally:
        os.close(handle)


def _least_s(act: Callable[[], Any]) -> float:
    taken_s = []
    for _ in range(ROUNDS):
        began_s = time.perf_counter()
        act()
        taken_s.append(time.perf_counter() - began_s)
    return min(taken_s)


def main(
    readers: Annotated[list[int] | None, typer.Argument()] = None,
    blocks: Annotated[int, typer.Option()] = 12,
    block_mb: Annotated[int, typer.Option()] = 150,
    folder: Annotated[Path | None, typer.Option()] = None,
) -> None:
    cores = usable_cores()
    counts = readers or [n for n in (1, 2, 4, 8, 12, 16) if n <= max(cores, 2)]
    with tempfile.TemporaryDirectory(prefix="rekindle-bench-", dir=folder) as path:
        shelf = Shelf(Path(path), blocks, int(block_mb * MEGA))
        file = max(Path(path).rglob("*"), key=lambda each: each.stat().st_size)
        print(f"{cores} cores; files of {block_mb} MB in the page cache. One core, GB/s:")
        for name, speed in stages(file).items():
            print(f"  {name:32} {speed:6.2f}")
        print("readers  GB/s (best)  first block ms  all ms (best)  core ms/GB  32k tokens, 8B, ms")
        for count in counts:
            found = shelf.restore(count)
            all_s, best_s = median(r.all_s for r in found), min(r.all_s for r in found)
            giga = shelf.size_bytes / GIGA
            print(
                f"{count:7}  {giga / all_s:4.1f} ({giga / best_s:4.1f})  "
                f"{1e3 * median(r.first_s for r in found):14.1f}  "
                f"{1e3 * all_s:6.0f} ({1e3 * best_s:4.0f})  "
                f"{1e3 * median(r.busy_s for r in found) / giga:10.0f}  "
                f"{1e3 * LONG_GB * all_s / giga:18.0f}",
                flush=True,
            )


if __name__ == "__main__":
    typer.run(main)
