from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from rekindle.kvcache.eviction.policy import Shares


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([b"a", b"b", b"c", b"d"]), st.integers(1, 9), st.booleans()),
        max_size=40,
    ),
    st.sets(st.sampled_from([b"a", b"b", b"c", b"d"])),
)
def test_room_is_made_by_the_tenant_that_holds_most(
    changes: list[tuple[bytes, int, bool]], pinned: set[bytes]
) -> None:
    """And by the next where all that it holds is spared."""
    shares = Shares()
    held: dict[bytes, list[tuple[bytes, int]]] = {}
    for number, (tenant, size, leaves) in enumerate(changes):
        mine = held.setdefault(tenant, [])
        if leaves and mine:
            shares.leave(tenant, *mine.pop())
        else:
            mine.append((b"%s %d" % (tenant, number), size))
            shares.enter(tenant, mine[-1][0], None, size)
    spared = {key for tenant in pinned for key, _ in held.get(tenant, ())}
    sizes = {
        tenant: sum(size for _, size in mine)
        for tenant, mine in held.items()
        if mine and tenant not in pinned
    }
    victim = shares.lowest(spared)
    if not sizes:
        assert victim is None
    else:
        assert victim is not None
        assert sizes[victim[:1]] == max(sizes.values())
    assert shares.lowest(spared) == victim  # it stays until it leaves


class CountedName(bytes):
    """A tenant's name that counts how often it is looked up."""

    lookups = 0

    def __hash__(self) -> int:
        CountedName.lookups += 1
        return super().__hash__()


def test_making_room_costs_the_same_however_many_tenants_there_are() -> None:
    shares = Shares()
    tenants = [CountedName(b"tenant %d" % number) for number in range(1000)]
    for tenant in tenants:
        shares.enter(tenant, b"block of " + tenant, None, 10)
    shares.lowest(set())  # those that have entered are sorted in now, each once
    CountedName.lookups = 0
    for number in range(10):
        victim = shares.lowest(set())
        assert victim is not None
        shares.leave(tenants[int(victim.split()[-1])], victim, 10)
        shares.enter(tenants[0], b"new %d 0" % number, None, 1)
    assert CountedName.lookups < len(tenants)
