"""Replays a trace through RAM and a ten times larger disk, and counts disk writes and reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rekindle.kvcache.eviction.hit_density import HitDensity
from rekindle.kvcache.eviction.policy import HitDensityRanking

Requests = list[list[bytes]]

DISK_TIMES_RAM = 10


@dataclass(slots=True)
class Counts:
    asked: int = 0
    hits: int = 0
    written: int = 0
    read: int = 0


class TwoTiers:
    """Blocks in RAM and on disk.

    With `least_chance`, a block that leaves RAM is written if its reuse is likely enough. Otherwise
    new blocks are written immediately, and tails when they leave RAM.
    """

    def __init__(self, ram_blocks: int, least_chance: float | None) -> None:
        self.limits = ram_blocks, DISK_TIMES_RAM * ram_blocks
        self.ram, self.disk = (HitDensityRanking(HitDensity()) for _ in range(2))
        self.least_chance = least_chance
        self.parents: dict[bytes, bytes | None] = {}
        self.counts = Counts()

    def ask(self, keys: list[bytes]) -> None:
        self.parents.update(zip(keys, [None, *keys], strict=False))
        known = [key in self.ram or key in self.disk for key in keys]
        count = known.index(False) if False in known else len(keys)
        self.counts.asked += len(keys)
        self.counts.hits += count
        for key in keys[:count]:
            self.disk.use(key)
            if key in self.ram:
                self.ram.use(key)
            else:
                self.counts.read += 1
                self.enter_ram(key)
        for at, key in enumerate(keys[count:], start=count):
            self.enter_ram(key)
            if self.least_chance is None and at < len(keys) - 1:
                self.write(key)

    def enter_ram(self, key: bytes) -> None:
        parent = self.parents[key]
        spared = {key} if parent is None else {key, parent}
        while len(self.ram) >= self.limits[0]:
            victim = self.ram.next_victim(spared)
            if victim is None:
                return
            if self.least_chance is None or self.ram.reuse_probability(victim) >= self.least_chance:
                self.write(victim)
            self.ram.remove(victim)
        self.ram.add(key, parent if parent in self.ram else None)

    def write(self, key: bytes) -> None:
        """Write a block with all its ancestors that are not on disk."""
        if key in self.disk:
            return
        parent = self.parents[key]
        if parent is not None:
            self.write(parent)
        while len(self.disk) >= self.limits[1]:
            victim = self.disk.next_victim(() if parent is None else (parent,))
            if victim is None:
                return
            self.disk.remove(victim)
        self.disk.add(key, parent)
        self.counts.written += 1


def report(name: str, requests: Requests, ram_blocks: int) -> Iterator[str]:
    yield f"\n{name}, {ram_blocks} blocks in RAM and {DISK_TIMES_RAM * ram_blocks} on disk"
    yield f"{'':36}{'hit':>8}{'written':>10}{'read':>8}{'written for each read':>24}"
    for title, least_chance in (
        ("all, behind each turn", None),
        ("all that leaves RAM", 0.0),
        ("what leaves RAM, if 2 % likely", 0.02),
        ("what leaves RAM, if 5 % likely", 0.05),
        ("what leaves RAM, if 10 % likely", 0.1),
        ("what leaves RAM, if 20 % likely", 0.2),
    ):
        tiers = TwoTiers(ram_blocks, least_chance)
        for keys in requests:
            tiers.ask(keys)
        counts = tiers.counts
        ratio = counts.written / max(counts.read, 1)
        share = counts.hits / counts.asked
        yield f"{title:36}{share:>8.4f}{counts.written:>10}{counts.read:>8}{ratio:>24.2f}"
