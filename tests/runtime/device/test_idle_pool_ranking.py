from __future__ import annotations

import pytest

from rekindle.engine.base import Sequence
from rekindle.kvcache.block import WriteBack
from rekindle.kvcache.eviction.policy import Evictor
from rekindle.runtime.device.idle_pool import IdleRanking
from rekindle.runtime.device.offload import IdleSequence
from rekindle.runtime.schedule.turn import Offloaded
from rekindle.tokens import Tokens

BLOCK_TOKENS = 8


def idle(ids: list[int], tenant: bytes = b"tenant") -> IdleSequence:
    return IdleSequence(
        Sequence(0, exact=False, kv_type="f16"),
        Tokens.of(ids),
        b"namespace of " + tenant,
        tenant,
        exact_tokens=0,
        write_back=WriteBack.NEVER,
        offloaded=Offloaded(0, b""),
    )


class Memory:
    """Idle sequences in the order of their last use."""

    def __init__(self) -> None:
        self.evictor = Evictor()
        self.ranking = IdleRanking(self.evictor, BLOCK_TOKENS)
        self.held: list[IdleSequence] = []

    def add(self, ids: list[int], tenant: bytes = b"tenant") -> IdleSequence:
        self.held.append(idle(ids, tenant))
        self.ranking.add(self.held[-1])
        return self.held[-1]

    def remove(self, sequence: IdleSequence, *, may_return: bool = True) -> None:
        self.held.remove(sequence)
        self.ranking.remove(sequence, may_return=may_return)

    def eviction_order(self) -> list[IdleSequence]:
        return list(self.ranking.eviction_order(self.held))


def test_before_anything_is_known_the_least_recently_used_leaves_first() -> None:
    memory = Memory()
    sequences = [memory.add([number] * 80) for number in range(5)]
    assert memory.eviction_order() == sequences


@pytest.mark.parametrize("turns", [2, 4])
def test_a_conversation_that_has_gone_on_outlives_one_that_was_begun_later(turns: int) -> None:
    memory = Memory()
    for turn in range(turns):
        if memory.held:
            memory.remove(memory.held[0])  # the next turn takes its place
        conversation = memory.add([1] * (80 + 10 * turn))
    other = memory.add([2] * 80)
    memory.add([3] * 80)
    assert memory.eviction_order()[0] is other
    assert conversation in memory.eviction_order()


def test_what_all_begin_with_keeps_none_of_them() -> None:
    memory = Memory()
    prompt = [7] * 400
    first, second = (memory.add([*prompt, *[number] * 40]) for number in (1, 2))
    assert memory.eviction_order() == [first, second]


def test_room_is_made_by_the_tenant_that_holds_most() -> None:
    memory = Memory()
    oldest = memory.add([1] * 88, b"one")
    greedy = [memory.add([number] * 80, b"another") for number in range(3)]
    assert memory.eviction_order()[0] is greedy[0]
    memory.remove(greedy[0])
    memory.remove(greedy[1])
    assert memory.eviction_order()[0] is oldest


def test_one_that_has_begun_to_leave_goes_on() -> None:
    memory = Memory()
    sequences = [memory.add([number] * 80) for number in range(3)]
    sequences[2].is_evicting = True
    assert memory.eviction_order() == [sequences[2], sequences[0], sequences[1]]


def test_the_beginning_of_another_and_the_same_twice_can_leave_too() -> None:
    memory = Memory()
    same = [memory.add([1] * 80) for _ in range(2)]
    beginning = memory.add([1] * 40)
    assert set(memory.eviction_order()) == {*same, beginning}


@pytest.mark.parametrize("may_return", [True, False])
def test_when_all_have_left_nothing_is_held(*, may_return: bool) -> None:
    memory = Memory()
    for length in (5, 8, 80, 81, 80):
        memory.add([1] * length)
    while memory.held:
        memory.remove(memory.held[0], may_return=may_return)
    assert memory.evictor.held_bytes(b"tenant") == 0
    assert memory.evictor.next_victim(()) is None
    assert memory.eviction_order() == []
