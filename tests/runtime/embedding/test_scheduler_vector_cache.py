from __future__ import annotations

import numpy as np

from rekindle.runtime.embedding.scheduler import OVERHEAD_BYTES, VectorCache

ROW = np.ones(4, np.float32)
ENTRY_BYTES = len(b"k") + ROW.nbytes + OVERHEAD_BYTES


def test_a_row_is_found_by_its_own_tenant_alone() -> None:
    cache = VectorCache(1 << 20)
    cache.put(b"one", b"k", ROW)
    assert list(cache.get(b"one", [b"k", b"l"])) == [b"k"]
    assert cache.get(b"other", [b"k"]) == {}


def test_the_least_recently_used_row_makes_room() -> None:
    cache = VectorCache(2 * ENTRY_BYTES)
    for key in (b"a", b"b"):
        cache.put(b"", key, ROW)
    cache.get(b"", [b"a"])
    cache.put(b"", b"c", ROW)
    assert list(cache.get(b"", [b"a", b"b", b"c"])) == [b"a", b"c"]
    assert cache.used_bytes == 2 * ENTRY_BYTES


def test_putting_a_row_again_takes_no_more_room() -> None:
    cache = VectorCache(1 << 20)
    for _ in range(3):
        cache.put(b"", b"k", ROW)
    assert (len(cache), cache.used_bytes) == (1, ENTRY_BYTES)


def test_without_a_budget_nothing_is_kept() -> None:
    cache = VectorCache(0)
    cache.put(b"", b"k", ROW)
    assert (len(cache), cache.used_bytes) == (0, 0)
