from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rekindle.lru import ByteLru


def test_the_least_recently_used_value_is_evicted_first() -> None:
    lru: ByteLru[str, bytes] = ByteLru(3, lambda _, value: len(value))
    for key in ("a", "b", "c"):
        assert lru.put(key, b"x") == []
    assert lru.get("a") == b"x"
    assert lru.put("d", b"xx") == ["b", "c"]
    assert list(lru) == ["a", "d"]


def test_a_value_that_is_larger_than_the_budget_is_not_stored_and_evicts_nothing() -> None:
    lru: ByteLru[str, bytes] = ByteLru(3, lambda _, value: len(value))
    lru.put("a", b"xx")
    assert lru.put("b", b"xxxx") == ["b"]
    assert lru.put("a", b"xxxx") == ["a"]
    assert (len(lru), lru.used_bytes) == (0, 0)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(-1, 8))), st.integers(0, 20))
def test_the_used_bytes_are_those_of_the_values_and_within_the_budget(
    changes: list[tuple[int, int]], limit_bytes: int
) -> None:
    lru: ByteLru[int, bytes] = ByteLru(limit_bytes, lambda _, value: len(value))
    for key, size in changes:
        if size < 0:
            lru.remove(key)
        else:
            lru.put(key, bytes(size))
        values = [lru.get(key) for key in list(lru)]
        assert lru.used_bytes == sum(len(value) for value in values if value is not None)
        assert lru.used_bytes <= limit_bytes
