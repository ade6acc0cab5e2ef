"""Places in the queue are limited, shared among tenants, and freed."""

from __future__ import annotations

import contextlib
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from rekindle.errors import TooManyRequests
from rekindle.http.limits import Accounts, KeyLimits
from rekindle.protocol.events import Cancelled, Delta, Event, Started, TextDelta
from rekindle.worker.activity import Activity
from rekindle.worker.client import OpenTurns
from tests.api.scripted import finished

A, B, C = b"a", b"b", b"c"


class Queue:
    """Uses OpenTurns as the client does. `refused` lists the displaced turns."""

    def __init__(self, places: int) -> None:
        self.turns = OpenTurns(places, Activity())
        self.owners: dict[int, bytes] = {}
        self.refused: list[int] = []
        self.events: list[Event] = []
        self._number = 0

    def begin(self, tenant: bytes, count: int = 1) -> list[int]:
        for displaced in self.turns.displaced_by(tenant, count):
            assert self.turns.abandon(displaced)
            self.end(displaced)  # the runtime ends it
            self.refused.append(displaced)
        begun = []
        for _ in range(count):
            self._number += 1
            self.owners[self._number] = tenant
            self.turns.add(self._number, tenant, self.events.append)
            begun.append(self._number)
        return begun

    def start(self, number: int) -> None:
        self.turns.deliver(Started(number, 1, 0))

    def end(self, number: int) -> None:
        self.turns.deliver(Cancelled(number))

    def held(self) -> Counter[bytes]:
        return Counter(self.owners[number] for number in self.turns.ids())


def fill(queue: Queue, tenant: bytes) -> None:
    """Begin turns until all places are taken."""
    with contextlib.suppress(TooManyRequests):
        while True:
            queue.begin(tenant)


def test_a_single_tenant_may_have_all_places() -> None:
    queue = Queue(10)
    fill(queue, A)
    assert queue.held() == {A: 10}
    assert queue.refused == []


def test_another_tenant_displaces_the_newest_waiting_turns() -> None:
    queue = Queue(10)
    fill(queue, A)
    fill(queue, B)
    assert queue.held() == {A: 5, B: 5}
    assert queue.refused == [10, 9, 8, 7, 6]
    fill(queue, C)
    assert queue.held() == {A: 4, B: 3, C: 3}


def test_a_started_turn_is_never_displaced() -> None:
    queue = Queue(4)
    for number in [queue.begin(A)[0] for _ in range(4)]:
        queue.start(number)
    with pytest.raises(TooManyRequests, match="4 requests"):
        queue.begin(B)
    assert queue.held() == {A: 4}


def test_two_tenants_for_one_place_do_not_displace_each_other() -> None:
    queue = Queue(1)
    queue.begin(A)
    with pytest.raises(TooManyRequests):
        queue.begin(B)


def test_a_request_with_more_choices_than_a_share_displaces_nobody() -> None:
    queue = Queue(10)
    fill(queue, A)
    with pytest.raises(TooManyRequests):
        queue.begin(B, count=6)
    assert queue.held() == {A: 10}
    queue.begin(B, count=5)
    assert queue.held() == {A: 5, B: 5}


def test_a_turn_cancelled_before_it_started_keeps_its_place_until_it_ends() -> None:
    queue = Queue(2)
    first, second = queue.begin(A)[0], queue.begin(A)[0]
    for number in (first, second):
        assert queue.turns.abandon(number)
        assert not queue.turns.abandon(number)
    with pytest.raises(TooManyRequests):
        queue.begin(A)
    queue.begin(B)  # B is not affected
    queue.end(first)
    queue.end(second)
    queue.begin(A)
    assert queue.events == []


def test_a_turn_cancelled_after_it_started_frees_its_place_immediately() -> None:
    queue = Queue(1)
    [number] = queue.begin(A)
    queue.start(number)
    assert queue.turns.abandon(number)
    queue.begin(B)
    queue.end(number)  # arrives late, and is ignored
    assert queue.held() == {B: 1}


@settings(max_examples=200, deadline=None)
@given(
    places=st.integers(1, 12),
    actions=st.lists(st.tuples(st.sampled_from("bseg"), st.integers(0, 3)), max_size=80),
)
def test_nobody_is_refused_while_another_tenant_has_more_than_its_share(
    places: int, actions: list[tuple[str, int]]
) -> None:
    queue = Queue(places)
    for action, pick in actions:
        ids = queue.turns.ids()
        number = ids[pick % len(ids)] if ids else 0
        if action == "b":
            tenant = (A, B, C)[pick % 3]
            before = queue.held()
            try:
                queue.begin(tenant)
            except TooManyRequests:
                share = max(places // len({*before, tenant}), 1)
                waiting = Counter(
                    queue.owners[n] for n, turn in queue.turns._turns.items() if turn.is_waiting
                )
                greedy = [t for t in waiting if before[t] > share]
                assert before[tenant] >= share or not greedy
        elif action == "s" and ids:
            queue.start(number)
        elif action == "e" and ids:
            queue.end(number)
        elif ids:
            queue.turns.abandon(number)
        listened = sum(turn.handler is not None for turn in queue.turns._turns.values())
        assert listened <= places
    for number in queue.turns.ids():
        queue.end(number)
    assert len(queue.turns) == 0


class Clock:
    def __call__(self) -> float:
        return 1000.0


def test_a_client_that_leaves_early_has_used_what_it_received_and_frees_its_place() -> None:
    account = Accounts(Clock()).of(b"a", "alice", KeyLimits(concurrent_turns=1))
    turns = OpenTurns(2, Activity())
    turns.add(1, b"a", lambda _event: None, account)
    turns.deliver(Started(1, 100, 40))
    for _ in range(3):
        turns.deliver(Delta(1, TextDelta("x")))
    assert account.usage.open_turns == 1
    turns.abandon(1)
    use = account.usage
    assert (use.open_turns, use.computed_prompt_tokens, use.generated_tokens) == (0, 60, 3)


def test_a_reply_that_ends_counts_every_token_once() -> None:
    account = Accounts(Clock()).of(b"a", "alice", KeyLimits())
    turns = OpenTurns(2, Activity())
    turns.add(1, b"a", lambda _event: None, account)
    turns.deliver(Started(1, 10, 0))
    turns.deliver(Delta(1, TextDelta("two tokens")))
    turns.deliver(structs.replace(finished(completion_tokens=9), turn=1))
    assert account.usage.generated_tokens == 9


def test_all_turns_of_a_tenant_are_found_and_no_other() -> None:
    turns = OpenTurns(4, Activity())
    for number, tenant in ((1, b"a"), (2, b"b"), (3, b"a")):
        turns.add(number, tenant, lambda _event: None)
    assert turns.of(b"a") == [1, 3]
    assert turns.of(b"c") == []
