"""Replay a request trace through our eviction and through plain LRU, without computing anything.

A trace has one JSON object a line with `hash_ids`: one id for each block of a prompt, equal ids
meaning an equal prefix (the format published with the Mooncake project).

    python benchmarks/eviction.py TRACE.jsonl [--tokens 1000000 --tokens 10000000]
"""

from __future__ import annotations

import argparse
import json
from collections import OrderedDict
from pathlib import Path

from rekindle.kvcache.policy import Ranking

TRACE_BLOCK_TOKENS = 512

Requests = list[list[bytes]]


def hit_rate_lru(requests: Requests, capacity: int) -> float:
    held: OrderedDict[bytes, None] = OrderedDict()
    hits = 0
    for keys in requests:
        hits += _prefix(keys, held)
        for key in reversed(keys):  # the first block last: a parent outlives its children
            held[key] = None
            held.move_to_end(key)
        while len(held) > capacity:
            held.popitem(last=False)
    return hits / _total(requests)


def hit_rate_ours(requests: Requests, capacity: int) -> float:
    ranking = Ranking()
    held: dict[bytes, None] = {}
    hits = 0
    for keys in requests:
        known = _prefix(keys, held)
        hits += known
        ranking.use(keys[:known])
        for at in range(known, len(keys)):
            if keys[at] in held:
                continue
            if len(held) >= capacity and not _evict(ranking, held, set(keys[:at])):
                break
            held[keys[at]] = None
            ranking.enter(keys[at], keys[at - 1] if at else None)
    return hits / _total(requests)


def _evict(ranking: Ranking, held: dict[bytes, None], spared: set[bytes]) -> bool:
    victim = ranking.evict(spared)
    if victim is not None:
        del held[victim]
    return victim is not None


def _prefix(keys: list[bytes], held: OrderedDict[bytes, None] | dict[bytes, None]) -> int:
    return next((at for at, key in enumerate(keys) if key not in held), len(keys))


def _total(requests: Requests) -> int:
    return sum(len(keys) for keys in requests)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--tokens", type=int, action="append", help="capacity; repeatable")
    given = parser.parse_args()
    lines = given.trace.read_text().splitlines()
    requests = [[i.to_bytes(8, "big") for i in json.loads(line)["hash_ids"]] for line in lines]
    print(f"{'tokens':>12} {'LRU':>7} {'ours':>7}")
    for tokens in given.tokens or [1_000_000, 3_000_000, 10_000_000]:
        blocks = tokens // TRACE_BLOCK_TOKENS
        lru, ours = hit_rate_lru(requests, blocks), hit_rate_ours(requests, blocks)
        print(f"{tokens:>12} {lru:>7.1%} {ours:>7.1%}")


if __name__ == "__main__":
    main()
