"""Concurrent embedding requests share engine calls, tenants take turns, and each turn ends once."""

from __future__ import annotations

import numpy as np

from rekindle.protocol.events import TERMINAL, Cancelled, Embedded, Event, Failed, Ranked, Started
from rekindle.protocol.requests import EmbedRequest, RankRequest
from rekindle.runtime.embedding.scheduler import (
    ENTRY_OVERHEAD_BYTES,
    EmbeddingScheduler,
    VectorCache,
)
from rekindle.runtime.embedding.turn import encode_inputs
from tests.support.fake_embedder import FakeEmbedder, vector_of

ROW = np.ones(4, np.float32)
ENTRY_BYTES = len(b"k") + ROW.nbytes + ENTRY_OVERHEAD_BYTES


class Harness:
    def __init__(self, *, batch_tokens: int = 32, ranks: bool = False) -> None:
        self.embedder = FakeEmbedder(batch_tokens=batch_tokens, ranks=ranks)
        self.events: list[Event] = []
        self.scheduler = EmbeddingScheduler(self.embedder, VectorCache(1 << 20), self.events.extend)

    def submit(
        self,
        turn: int,
        *inputs: str,
        salt: bytes = b"",
        batch_size: int | None = None,
        reuse: bool = True,
    ) -> None:
        request = EmbedRequest(
            turn=turn, inputs=list(inputs), salt=salt, batch_size=batch_size, reuse=reuse
        )
        self.scheduler.submit(encode_inputs(self.embedder, request))

    def run(self) -> None:
        while self.scheduler.step():
            pass
        ended = [event.turn for event in self.events if isinstance(event, TERMINAL)]
        begun = [event.turn for event in self.events if isinstance(event, Started)]
        assert sorted(ended) == sorted(begun), "every turn ends once"
        assert self.scheduler.stats().active_turns == 0

    def embedded(self, turn: int) -> Embedded:
        [found] = [each for each in self.events if isinstance(each, Embedded) and each.turn == turn]
        return found


def test_waiting_requests_share_an_engine_call() -> None:
    harness = Harness()
    harness.submit(1, "1 2", "3")
    harness.submit(2, "4")
    harness.run()
    assert len(harness.embedder.calls) == 1
    vectors = np.frombuffer(harness.embedded(1).vectors, "<f4").reshape(2, -1)
    assert np.array_equal(vectors, [vector_of([1, 2]), vector_of([3])])


def test_a_short_request_finishes_before_a_long_one_that_came_first() -> None:
    harness = Harness(batch_tokens=4)
    harness.submit(1, *map(str, range(40)))
    harness.submit(2, "50")
    harness.run()
    ends = [event.turn for event in harness.events if isinstance(event, Embedded)]
    assert ends == [2, 1]


def test_tenants_take_turns_however_many_requests_one_has() -> None:
    harness = Harness(batch_tokens=2)
    for turn in range(10):
        harness.submit(turn, *(f"{turn} {each}" for each in range(5)), salt=b"many")
    harness.submit(10, *map(str, range(5)), salt=b"one")
    harness.run()
    ends = [event.turn for event in harness.events if isinstance(event, Embedded)]
    assert ends.index(10) <= 1


def test_batch_size_limits_how_many_inputs_of_a_request_share_a_call() -> None:
    harness = Harness()
    harness.submit(1, *map(str, range(7)), batch_size=3)
    harness.run()
    assert [len(call) for call in harness.embedder.calls] == [3, 3, 1]


def test_rows_are_reused_within_a_tenant() -> None:
    harness = Harness()
    harness.submit(1, "1 2", "3")
    harness.run()
    harness.submit(2, "3", "1 2")
    harness.submit(3, "3", "4 5")
    harness.submit(4, "3", salt=b"other")
    harness.submit(5, "3", reuse=False)
    harness.run()
    reused = [harness.embedded(turn).reused_tokens for turn in (2, 3, 4, 5)]
    assert reused == [3, 1, 0, 0]
    assert harness.embedded(2).vectors != harness.embedded(1).vectors
    stats = harness.scheduler.stats()
    assert (stats.hits, stats.partial_hits, stats.misses) == (1, 1, 2)
    assert (stats.computed_tokens, stats.reused_tokens) == (7, 4)
    assert stats.ram_bytes > 0


def test_a_cancelled_request_is_not_computed_further() -> None:
    harness = Harness(batch_tokens=2)
    harness.submit(1, *map(str, range(10)))
    harness.submit(2, "20")
    harness.scheduler.step()
    harness.scheduler.cancel(1)
    harness.scheduler.cancel(1)
    harness.run()
    assert [event for event in harness.events if isinstance(event, Cancelled)] == [Cancelled(1)]
    assert sum(map(len, harness.embedder.calls)) == 2


def test_a_failed_call_fails_only_its_own_requests() -> None:
    harness = Harness(batch_tokens=1)
    harness.embedder.breaks_on = 7
    harness.submit(1, "7")
    harness.submit(2, "8")
    harness.run()
    [failed] = [event for event in harness.events if isinstance(event, Failed)]
    assert (failed.turn, failed.error.status) == (1, 500)
    assert harness.embedded(2)


def test_stopping_cancels_open_requests() -> None:
    harness = Harness()
    harness.submit(1, "1")
    harness.scheduler.stop()
    harness.run()
    assert harness.events[-1] == Cancelled(1)


def test_documents_are_scored_in_order_and_cached() -> None:
    harness = Harness(ranks=True)
    for turn in (1, 2):
        request = RankRequest(turn=turn, query="1", documents=["20", "60", "20"])
        harness.scheduler.submit(encode_inputs(harness.embedder, request))
        harness.run()
    first, second = (event for event in harness.events if isinstance(event, Ranked))
    assert np.allclose(first.scores, [0.2, 0.6, 0.2])
    assert (first.reused_tokens, second.reused_tokens) == (2, 6)
    assert len(harness.embedder.calls) == 1


def test_a_tenant_does_not_see_the_rows_of_another() -> None:
    cache = VectorCache(1 << 20)
    cache.put(b"one", b"k", ROW)
    assert list(cache.get(b"one", [b"k", b"l"])) == [b"k"]
    assert cache.get(b"other", [b"k"]) == {}


def test_the_cache_evicts_the_least_recently_used_row() -> None:
    cache = VectorCache(2 * ENTRY_BYTES)
    for key in (b"a", b"b"):
        cache.put(b"", key, ROW)
    cache.get(b"", [b"a"])
    cache.put(b"", b"c", ROW)
    assert list(cache.get(b"", [b"a", b"b", b"c"])) == [b"a", b"c"]
    assert cache.rows.used_bytes == 2 * ENTRY_BYTES


def test_storing_a_row_twice_counts_its_bytes_once() -> None:
    cache = VectorCache(1 << 20)
    for _ in range(3):
        cache.put(b"", b"k", ROW)
    assert (len(cache.rows), cache.rows.used_bytes) == (1, ENTRY_BYTES)


def test_a_cache_without_a_budget_stores_nothing() -> None:
    cache = VectorCache(0)
    cache.put(b"", b"k", ROW)
    assert (len(cache.rows), cache.rows.used_bytes) == (0, 0)
