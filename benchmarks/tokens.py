"""Measures the cost of matching, comparing and hashing the tokens of a long prompt.

Run it with `python -m benchmarks.tokens`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from statistics import median

from rekindle.kvcache.block import chain_key
from rekindle.kvcache.store import Store
from rekindle.kvcache.tiers.ram import RamTier
from rekindle.tokens import TokenBuffer, Tokens

PROMPT_TOKENS = 32_768
BLOCK_TOKENS = 64
SYSTEM_TOKENS = 1024  # common prefix of the prompt and the other conversations
OTHERS = 2000
OTHER_TOKENS = 128  # of each conversation, after the common prefix
ROUNDS = 50
NAMESPACE = b"n" * 32
STATE = bytes(64)


def keep(store: Store, tokens: Tokens) -> None:
    """Store a conversation block by block, like a finished turn."""
    parent = NAMESPACE
    for start in range(0, len(tokens), BLOCK_TOKENS):
        block = tokens[start : start + BLOCK_TOKENS]
        if store.wants(parent, block, exact=False):
            store.put(NAMESPACE, parent, block, STATE, exact=False)
        parent = chain_key(parent, block)


def name(tokens: Tokens) -> bytes:
    """The chain key of the last block of a prompt."""
    key = NAMESPACE
    for start in range(0, len(tokens), BLOCK_TOKENS):
        key = chain_key(key, tokens[start : start + BLOCK_TOKENS])
    return key


def measure_ms(work: Callable[[], object]) -> float:
    """The median of several rounds."""
    taken = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        work()
        taken.append((time.perf_counter() - started) * 1000)
    return median(taken)


def main() -> None:
    chance = random.Random(1)
    ids = [chance.randrange(150_000) for _ in range(PROMPT_TOKENS)]
    prompt = Tokens.of(ids)
    store = Store(block_tokens=BLOCK_TOKENS, tiers=[RamTier(1 << 32)])
    for _ in range(OTHERS):
        own = [chance.randrange(150_000) for _ in range(OTHER_TOKENS)]
        keep(store, prompt[:SYSTEM_TOKENS] + Tokens.of(own))
    keep(store, prompt)
    assert store.match(NAMESPACE, prompt).tokens == PROMPT_TOKENS
    one, other = TokenBuffer(prompt), TokenBuffer(Tokens.of(ids))
    equal = Tokens.of(ids)
    crowded = Store(block_tokens=BLOCK_TOKENS, tiers=[RamTier(2000 * 700)])

    def crowd() -> None:
        ids[0] = chance.randrange(150_000)
        keep(crowded, Tokens.of(ids))

    rows = {
        "ids to tokens": lambda: Tokens.of(ids),
        "match": lambda: store.match(NAMESPACE, prompt),
        "common prefix": lambda: prompt.common_prefix(equal),
        "common prefix of buffers": lambda: one.common_prefix(other),
        "chain keys": lambda: name(prompt),
        "keep, known": lambda: keep(store, prompt),
        "keep, RAM full": crowd,
    }
    for label, work in rows.items():
        print(f"{label:26}{measure_ms(work):9.3f} ms")


if __name__ == "__main__":
    main()
