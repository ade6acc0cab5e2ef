from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from rekindle.kvcache.eviction.policy import Evictor


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([b"a", b"b", b"c", b"d"]), st.integers(1, 9), st.booleans()),
        max_size=40,
    ),
    st.sets(st.sampled_from([b"a", b"b", b"c", b"d"])),
)
def test_the_tenant_that_holds_the_most_gives_way(
    changes: list[tuple[bytes, int, bool]], pinned: set[bytes]
) -> None:
    """The next largest tenant gives way if everything of the largest is excluded."""
    evictor = Evictor()
    held: dict[bytes, list[tuple[bytes, int]]] = {}
    for number, (tenant, size, leaves) in enumerate(changes):
        mine = held.setdefault(tenant, [])
        if leaves and mine:
            evictor.remove(tenant, *mine.pop())
        else:
            mine.append((b"%s %d" % (tenant, number), size))
            evictor.add(tenant, mine[-1][0], None, size)
    excluded = {key for tenant in pinned for key, _ in held.get(tenant, ())}
    sizes = {
        tenant: sum(size for _, size in mine)
        for tenant, mine in held.items()
        if mine and tenant not in pinned
    }
    victim = evictor.next_victim(excluded)
    if not sizes:
        assert victim is None
    else:
        assert victim is not None
        assert sizes[victim[:1]] == max(sizes.values())
    assert evictor.next_victim(excluded) == victim  # it was not removed


class CountedName(bytes):
    """A tenant's name that counts its lookups."""

    lookups = 0

    def __hash__(self) -> int:
        CountedName.lookups += 1
        return super().__hash__()


def test_the_cost_of_an_eviction_does_not_depend_on_the_number_of_tenants() -> None:
    evictor = Evictor()
    tenants = [CountedName(b"tenant %d" % number) for number in range(1000)]
    for tenant in tenants:
        evictor.add(tenant, b"block of " + tenant, None, 10)
    evictor.next_victim(set())  # those that have entered are sorted in now, each once
    CountedName.lookups = 0
    for number in range(10):
        victim = evictor.next_victim(set())
        assert victim is not None
        evictor.remove(tenants[int(victim.split()[-1])], victim, 10)
        evictor.add(tenants[0], b"new %d 0" % number, None, 1)
    assert CountedName.lookups < len(tenants)
