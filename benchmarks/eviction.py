"""Replays request traces through eviction policies, without computing anything.

A trace has one JSON object a line with `hash_ids`: one id for each block of a prompt, equal ids
meaning an equal prefix (the format published with the Mooncake project). A hit needs the whole
chain before it.

Which blocks share a set of ghosts depends on the keys. So hit density is replayed with several sets
of keys (`--salts`), and the mean and the spread are printed.

    python benchmarks/eviction.py TRACE.jsonl… [--tokens 1000000] [--salts 3] [--writes] [--cost]
"""

from __future__ import annotations

import argparse
import heapq
import json
import time
from collections import defaultdict
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Protocol

import disk_writes
from blake3 import blake3

from rekindle.kvcache.eviction.hit_density import HitDensity
from rekindle.kvcache.eviction.policy import Evictor, HitDensityRanking, LruRanking

TRACE_BLOCK_TOKENS = 512
TOKENS = [500_000, 1_000_000, 3_000_000, 5_000_000, 10_000_000]
BAR_WIDTH = 40
ODD = 0x9E3779B97F4A7C15  # converts between keys and numbers

Requests = list[list[bytes]]


class Policy(Protocol):
    """The part of a ranking that a replay needs."""

    def add(self, key: bytes, parent: bytes | None) -> None: ...
    def use(self, key: bytes) -> None: ...
    def next_victim(self, excluded: Container[bytes]) -> bytes | None: ...
    def remove(self, key: bytes) -> None: ...


class Clairvoyant:
    """Knows the trace, and evicts the leaf whose next use is the furthest away."""

    def __init__(self, requests: Requests) -> None:
        self.at = 0
        self._ranks: dict[bytes, int] = {}
        self._parents: dict[bytes, bytes | None] = {}
        self._children: defaultdict[bytes, int] = defaultdict(int)
        self._leaves: list[tuple[int, bytes]] = []
        self._coming: defaultdict[bytes, list[int]] = defaultdict(list)
        for at in range(len(requests) - 1, -1, -1):
            for key in requests[at]:
                self._coming[key].append(at)

    def add(self, key: bytes, parent: bytes | None) -> None:
        self._parents[key] = parent
        if parent is not None:
            self._children[parent] += 1
        self.use(key)

    def use(self, key: bytes) -> None:
        self._ranks[key] = -self.next_use(key)
        heapq.heappush(self._leaves, (self._ranks[key], key))

    def next_victim(self, excluded: Container[bytes]) -> bytes | None:
        skipped, victim = [], None
        while victim is None and self._leaves:
            rank, key = heapq.heappop(self._leaves)
            if self._ranks.get(key) != rank or self._children[key]:
                continue
            skipped.append((rank, key))
            if key not in excluded:
                victim = key
        for entry in skipped:
            heapq.heappush(self._leaves, entry)
        return victim

    def remove(self, key: bytes) -> None:
        del self._ranks[key]
        parent = self._parents.pop(key)
        if parent is not None:
            self._children[parent] -= 1
            heapq.heappush(self._leaves, (self._ranks[parent], parent))

    def next_use(self, key: bytes) -> int:
        coming = self._coming[key]
        while coming and coming[-1] <= self.at:
            coming.pop()
        return coming[-1] if coming else 1 << 40

    def is_worse(self, key: bytes) -> bool:
        """Whether a new key would be the next victim."""
        while self._leaves:
            rank, leaf = self._leaves[0]
            if self._ranks.get(leaf) == rank and not self._children[leaf]:
                return -self.next_use(key) <= rank
            heapq.heappop(self._leaves)
        return False


def hits(requests: Requests, capacity: int, policy: Policy) -> list[int]:
    """The number of blocks of each request that are hit."""
    held: set[bytes] = set()
    found = []
    for at, keys in enumerate(requests):
        known = next((i for i, key in enumerate(keys) if key not in held), len(keys))
        found.append(known)
        if isinstance(policy, Clairvoyant):
            policy.at = at
        for key in keys[:known]:
            policy.use(key)
        for i in range(known, len(keys)):
            parent = keys[i - 1] if i else None
            if len(held) >= capacity:
                if isinstance(policy, Clairvoyant) and policy.is_worse(keys[i]):
                    break
                victim = policy.next_victim({parent} if parent is not None else set())
                if victim is None:
                    break
                policy.remove(victim)
                held.remove(victim)
            held.add(keys[i])
            policy.add(keys[i], parent)
    return found


def policies(requests: Requests) -> dict[str, Callable[[], Policy]]:
    return {
        "LRU": LruRanking,
        "hit density": lambda: HitDensityRanking(HitDensity()),
        "clairvoyant": lambda: Clairvoyant(requests),
    }


@dataclass(frozen=True, slots=True)
class Cell:
    """The share of hit blocks of the whole trace and of its second half, for each set of keys."""

    whole: list[float]
    second: list[float]

    @property
    def spread(self) -> float:
        return (max(self.second) - min(self.second)) / fmean(self.second)


def measure(requests: Requests, capacity: int, name: str, salts: int) -> Cell:
    half = len(requests) // 2
    cell = Cell([], [])
    for salt in range(salts if name == "hit density" else 1):
        salted = with_salt(requests, salt)
        found = hits(salted, capacity, policies(salted)[name]())
        cell.whole.append(sum(found) / sum(map(len, requests)))
        cell.second.append(sum(found[half:]) / sum(map(len, requests[half:])))
    return cell


def with_salt(requests: Requests, salt: int) -> Requests:
    """Other keys, distributed as evenly as the hashes of a store."""
    keys = {key for each in requests for key in each}
    salted = {key: blake3(key + bytes([salt])).digest(8) for key in keys}
    return [[salted[key] for key in each] for each in requests]


def read(trace: Path) -> Requests:
    lines = trace.read_text().splitlines()
    ids = [[i.to_bytes(8, "big") for i in json.loads(line)["hash_ids"]] for line in lines]
    return with_salt(ids, 0)


def writes(trace: Path, capacities: list[int]) -> Iterator[str]:
    requests = read(trace)
    for tokens in capacities:
        yield from disk_writes.report(trace.stem, requests, tokens // TRACE_BLOCK_TOKENS)


def report(trace: Path, capacities: list[int], salts: int) -> Iterator[str]:
    requests = read(trace)
    rows = {
        name: [
            measure(requests, tokens // TRACE_BLOCK_TOKENS, name, salts) for tokens in capacities
        ]
        for name in policies(requests)
    }
    heads = " ".join(f"{tokens / 1e6:>7g}M" for tokens in capacities)
    whole = {name: [fmean(cell.whole) for cell in row] for name, row in rows.items()}
    second = {name: [fmean(cell.second) for cell in row] for name, row in rows.items()}
    for title, means in (("whole trace", whole), ("second half", second)):
        yield f"\n{trace.stem}, {title}: share of blocks hit, at tokens of capacity"
        yield f"{'':24}{heads}"
        for name, row in means.items():
            yield f"{name:24}" + " ".join(f"{each:>8.4f}" for each in row)
        shares = zip(means["hit density"], means["clairvoyant"], strict=True)
        yield f"{'of the clairvoyant':24}" + " ".join(f"{a / b:>8.1%}" for a, b in shares)
    spreads = (cell.spread for cell in rows["hit density"])
    yield f"{'hit density, spread':24}" + " ".join(f"{spread:>8.1%}" for spread in spreads)
    yield from plot(second, capacities)


def plot(rows: dict[str, list[float]], capacities: list[int]) -> Iterator[str]:
    most = max(max(row) for row in rows.values())
    yield "\nsecond half:"
    for at, tokens in enumerate(capacities):
        for name, row in rows.items():
            bar = "#" * round(row[at] / most * BAR_WIDTH)
            yield f"{tokens / 1e6:>5g}M {name:24}{bar} {row[at]:.3f}"


class FullTier:
    """Blocks without parents. The tenants take turns."""

    def __init__(self, blocks: int, tenants: int) -> None:
        self.evictor = Evictor()
        self.tenants = tenants
        self.blocks = 0
        while self.blocks < blocks:
            self.enter()

    def enter(self) -> None:
        tenant, key = self.named(self.blocks)
        self.evictor.add(tenant, key, None, 1)
        self.blocks += 1

    def named(self, number: int) -> tuple[bytes, bytes]:
        return (number % self.tenants).to_bytes(8, "big"), (number * ODD % 2**64).to_bytes(8, "big")

    def use(self, number: int) -> None:
        self.evictor.use(*self.named(number))

    def replace(self) -> None:
        victim = self.evictor.next_victim(())
        assert victim is not None
        number = int.from_bytes(victim, "big") * pow(ODD, -1, 2**64) % 2**64
        self.evictor.remove(self.named(number)[0], victim, 1)
        self.enter()


def cost() -> Iterator[str]:
    """Processor time of a hit, and of an eviction with the following insertion."""
    yield f"{'blocks':>9} {'tenants':>8} {'use, µs':>9} {'evict and enter, µs':>20}"
    for blocks, tenants in ((10**3, 1), (10**4, 1), (10**5, 1), (10**6, 1), (10**5, 10**4)):
        tier = FullTier(blocks, tenants)
        for _ in range(7000):
            tier.replace()
        begin_s = time.process_time()
        for at in range(5000):
            tier.use(tier.blocks - 1 - at * 7919 % blocks)
        used_s = time.process_time()
        for _ in range(5000):
            tier.replace()
        use_us, evict_us = (used_s - begin_s) * 200, (time.process_time() - used_s) * 200
        yield f"{blocks:>9} {tenants:>8} {use_us:>9.1f} {evict_us:>20.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("traces", type=Path, nargs="*")
    parser.add_argument("--tokens", type=int, action="append", help="capacity; repeatable")
    parser.add_argument("--salts", type=int, default=3, help="sets of keys to replay with")
    parser.add_argument("--writes", action="store_true", help="count what goes to disk instead")
    parser.add_argument("--cost", action="store_true", help="time uses and evictions instead")
    given = parser.parse_args()
    for line in cost() if given.cost else ():
        print(line, flush=True)
    for trace in given.traces:
        capacities = given.tokens or TOKENS
        lines = writes(trace, capacities) if given.writes else None
        for line in lines or report(trace, capacities, given.salts):
            print(line, flush=True)


if __name__ == "__main__":
    main()
