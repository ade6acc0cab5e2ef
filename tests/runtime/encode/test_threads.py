"""Encoder threads serve tenants in turn and drop cancelled requests."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue
from random import Random

import pytest

from rekindle.protocol.admin import Tokenize, Tokenized
from rekindle.protocol.events import Cancelled
from rekindle.runtime.encode.threads import LARGE_BYTES, Encoders, Job, Tokenisation
from tests.support.fake import NumberTokenizer
from tests.support.rounds import rounds

PATIENCE_S = 30.0
SMALL, LARGE = 100, LARGE_BYTES + 1
A, B, C = b"a", b"b", b"c"

Outcome = str | Cancelled


@dataclass
class EncodersHarness:
    """Encoders and what came out of them; a job may be held until `released` is set."""

    outcomes: SimpleQueue[Outcome] = field(default_factory=SimpleQueue)
    started: SimpleQueue[str] = field(default_factory=SimpleQueue)
    released: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.encoders: Encoders[str] = Encoders(self.outcomes.put)

    def submit(
        self,
        *names: str,
        tenant: bytes,
        size_bytes: int = SMALL,
        turns: tuple[int, ...] = (),
        constrained: bool = False,
    ) -> None:
        self.encoders.submit(Job(tenant, size_bytes, lambda: names, turns, constrained))

    def submit_held(
        self,
        *names: str,
        tenant: bytes,
        size_bytes: int = SMALL,
        turns: tuple[int, ...] = (),
        constrained: bool = False,
    ) -> None:
        """Submit a job that finishes when `released` is set."""

        def encode() -> tuple[str, ...]:
            self.started.put(names[0])
            assert self.released.wait(PATIENCE_S)
            return names

        self.encoders.submit(Job(tenant, size_bytes, encode, turns, constrained))

    def next(self) -> Outcome:
        return self.outcomes.get(timeout=PATIENCE_S)

    def hold_all(self) -> None:
        """Occupy every encoder thread for requests without a grammar."""
        for name, size_bytes in (("large", LARGE), ("small", SMALL)):
            self.submit_held(name, tenant=b"busy", size_bytes=size_bytes)
            assert self.started.get(timeout=PATIENCE_S) == name


@contextmanager
def running() -> Iterator[EncodersHarness]:
    opened = EncodersHarness()
    try:
        yield opened
    finally:
        opened.released.set()


def test_large_requests_leave_one_encoder_to_small_ones() -> None:
    with running() as harness:
        for number in range(10):
            harness.submit_held(f"large {number}", tenant=A, size_bytes=LARGE)
        for number in range(3):
            harness.submit(f"small {number}", tenant=B)
        assert [harness.next() for _ in range(3)] == ["small 0", "small 1", "small 2"]


def test_a_large_request_waits_for_at_most_one_of_each_other_tenant() -> None:
    with running() as harness:
        harness.hold_all()
        for number in range(10):
            harness.submit(f"a{number}", tenant=A, size_bytes=LARGE)
        harness.submit("b", tenant=B, size_bytes=LARGE)
        harness.released.set()
        done = [harness.next() for _ in range(13)]
        assert [name for name in done if name not in ("large", "small")][:2] == ["a0", "b"]


@pytest.mark.parametrize("size_bytes", [SMALL, LARGE])
def test_requests_with_a_grammar_leave_the_encoders_to_others(size_bytes: int) -> None:
    with running() as harness:
        for tenant in (A, B, C):
            for number in range(3):
                name = f"{tenant!r} {number}"
                harness.submit_held(name, tenant=tenant, size_bytes=size_bytes, constrained=True)
        for tenant in (A, B, C):
            harness.submit("plain", tenant=tenant)
            assert harness.next() == "plain"


def test_a_tenant_has_one_request_with_a_grammar_encoded_at_a_time() -> None:
    with running() as harness:
        for number in range(3):
            harness.submit_held(f"a{number}", tenant=A, constrained=True)
        assert harness.started.get(timeout=PATIENCE_S) == "a0"
        harness.submit("b", tenant=B, constrained=True)
        assert harness.next() == "b"
        assert harness.started.empty()
        harness.released.set()
        assert [harness.next() for _ in range(3)] == ["a0", "a1", "a2"]


def test_a_waiting_request_with_a_grammar_can_be_cancelled() -> None:
    with running() as harness:
        harness.submit_held("first", tenant=A, constrained=True)
        harness.submit_held("second", tenant=A, turns=(2,), constrained=True)
        assert harness.encoders.cancel(2)
        assert harness.next() == Cancelled(2)
        harness.released.set()
        assert harness.next() == "first"
        harness.submit("third", tenant=A, constrained=True)
        assert harness.next() == "third"


@pytest.mark.parametrize("constrained", [False, True])
def test_the_encoders_know_since_when_they_work(constrained: bool) -> None:
    with running() as harness:
        assert harness.encoders.working_since_s is None
        before_s = time.monotonic()
        harness.submit_held("held", tenant=A, constrained=constrained)
        harness.started.get(timeout=PATIENCE_S)
        since_s = harness.encoders.working_since_s
        assert since_s is not None
        assert before_s <= since_s <= time.monotonic()
        harness.submit("other", tenant=B)  # progress elsewhere does not hide it
        assert harness.next() == "other"
        assert harness.encoders.working_since_s == since_s
        harness.released.set()
        assert harness.next() == "held"
        assert harness.encoders.working_since_s is None


@pytest.mark.parametrize("size_bytes", [SMALL, LARGE])
def test_a_turn_cancelled_in_the_queue_is_never_encoded(size_bytes: int) -> None:
    with running() as harness:
        harness.hold_all()
        harness.submit_held("encoded", tenant=A, size_bytes=size_bytes, turns=(1,))
        assert harness.encoders.cancel(1)
        assert harness.next() == Cancelled(1)  # while all encoders are busy
        assert not harness.encoders.cancel(1)
        harness.released.set()
        assert {harness.next(), harness.next()} == {"large", "small"}
        harness.submit("last", tenant=A, size_bytes=size_bytes)
        assert harness.next() == "last"
        assert harness.started.empty()


def test_a_turn_cancelled_during_encoding_ends_once_and_immediately() -> None:
    with running() as harness:
        harness.submit_held("encoded", tenant=A, turns=(7,))
        harness.started.get(timeout=PATIENCE_S)
        assert harness.encoders.cancel(7)
        assert harness.next() == Cancelled(7)
        assert not harness.encoders.cancel(7)
        harness.released.set()
        harness.submit("after", tenant=A)
        assert harness.next() == "after"


def test_cancelling_one_choice_keeps_the_others() -> None:
    with running() as harness:
        harness.hold_all()
        harness.submit("first", "second", "third", tenant=A, turns=(1, 2, 3))
        assert harness.encoders.cancel(2)
        assert harness.next() == Cancelled(2)
        harness.released.set()
        done = [harness.next() for _ in range(4)]
        assert [name for name in done if name not in ("large", "small")] == ["first", "third"]


def test_a_rejected_request_ends_each_of_its_turns() -> None:
    with running() as harness:
        harness.submit("refused", "refused", tenant=A, turns=(1, 2))
        assert [harness.next(), harness.next()] == ["refused", "refused"]


def test_a_delivered_turn_can_no_longer_be_cancelled() -> None:
    with running() as harness:
        harness.submit("done", tenant=A, turns=(3,))
        assert harness.next() == "done"
        assert not harness.encoders.cancel(3)


@pytest.mark.long
def test_turns_cancelled_at_random_times_end_exactly_once() -> None:
    turns = rounds(2_000, 20_000)
    chance = Random(3)
    cancels: SimpleQueue[int | None] = SimpleQueue()

    def cancel_some(harness: EncodersHarness) -> None:
        while (turn := cancels.get(timeout=PATIENCE_S)) is not None:
            harness.encoders.cancel(turn)

    with running() as harness:
        canceller = threading.Thread(target=cancel_some, args=(harness,))
        canceller.start()
        for turn in range(turns):
            size_bytes = chance.choice((SMALL, LARGE))
            tenant = chance.choice((A, B, C))
            harness.submit(
                str(turn),
                tenant=tenant,
                size_bytes=size_bytes,
                turns=(turn,),
                constrained=chance.random() < 0.3,
            )
            cancels.put(chance.randrange(turn + 1))
        cancels.put(None)
        canceller.join(PATIENCE_S)
        outcomes = [harness.next() for _ in range(turns)]
    ended = [int(each) if isinstance(each, str) else each.turn for each in outcomes]
    assert sorted(ended) == list(range(turns))
    assert harness.outcomes.empty()


def test_the_text_of_a_token_is_sent_once_however_often_the_token_occurs() -> None:
    tokenizer = NumberTokenizer()
    tokenisation = Tokenisation(tokenizer, 16, tokenizer.encode)
    found = tokenisation.answer(Tokenize(text="5 7 5 5", with_pieces=True))
    assert isinstance(found, Tokenized)
    assert list(found.ids) == [5, 7, 5, 5]
    assert found.pieces == {id: tokenizer.piece(id, special=True) for id in (5, 7)}
    assert found.count == 4
