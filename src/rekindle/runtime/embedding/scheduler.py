"""Batches the inputs of all waiting embedding requests, and caches the rows it computes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np

from rekindle.engine.base import Embedder, Matrix
from rekindle.errors import EngineBroken, ServerError
from rekindle.fair_queue import FairQueue
from rekindle.lru import ByteLru
from rekindle.protocol.admin import Stats
from rekindle.protocol.events import Cancelled, Event, Failed, Started
from rekindle.runtime.embedding.turn import EmbeddingTurn, Input

ENTRY_OVERHEAD_BYTES = 300  # estimated memory of a cache entry, without its key and its row


class VectorCache:
    """Rows computed before, per tenant. Evicts the least recently used row when over budget."""

    def __init__(self, limit_bytes: int) -> None:
        self.rows: ByteLru[tuple[bytes, bytes], Matrix] = ByteLru(
            limit_bytes, lambda name, row: len(name[1]) + row.nbytes + ENTRY_OVERHEAD_BYTES
        )

    def get(self, salt: bytes, keys: Iterable[bytes]) -> dict[bytes, Matrix]:
        """Return the tenant's cached rows by key, and mark them as recently used."""
        rows = ((key, self.rows.get((salt, key))) for key in keys)
        return {key: row for key, row in rows if row is not None}

    def put(self, salt: bytes, key: bytes, row: Matrix) -> None:
        self.rows.put((salt, key), row)

    def forget(self, salt: bytes) -> int:
        """Remove the rows of a tenant. Returns their number."""
        found = [name for name in self.rows if name[0] == salt]
        for name in found:
            self.rows.remove(name)
        return len(found)


EmbeddingBatch = list[tuple[EmbeddingTurn, Input]]


class EmbeddingScheduler:
    """Computes inputs of several requests in one engine call, and ends each turn with one event.

    A short request does not wait for a long one to finish, and many short requests are computed as
    fast as one large one.
    """

    def __init__(
        self, embedder: Embedder, cache: VectorCache, emit: Callable[[list[Event]], None]
    ) -> None:
        self._embedder = embedder
        self._cache = cache
        self._emit = emit
        self._waiting: FairQueue[EmbeddingTurn] = FairQueue()
        self._statuses: Counter[str] = Counter()
        self._computed_tokens = 0
        self._reused_tokens = 0

    def submit(self, turn: EmbeddingTurn) -> None:
        """Queue a turn. If all its rows are cached, answer it immediately."""
        request = turn.request
        if request.reuse:
            keys = [each.key for each in turn.missing]
            cached = self._cache.get(request.salt, keys)
            status = "hit" if len(cached) == len(keys) else "partial_hit" if cached else "miss"
            self._statuses[status] += 1
            turn.reuse(cached)
        missing_tokens = sum(len(each.tokens) for each in turn.missing)
        reused_tokens = turn.prompt_tokens - missing_tokens
        self._emit([Started(turn.id, turn.prompt_tokens, reused_tokens)])
        if turn.is_complete:
            self._finish(turn)
        else:
            self._waiting.put(request.salt, turn)

    def forget_tenant(self, salt: bytes) -> int:
        """Remove what was computed for a tenant. Returns the number of vectors."""
        return self._cache.forget(salt)

    def cancel(self, number: int) -> None:
        for turn in self._waiting:
            if turn.id == number:
                self._waiting.remove(turn.request.salt, turn)
                self._emit([Cancelled(number)])
                return

    def step(self) -> bool:
        """Compute one batch. Returns False when no turn is left."""
        batch = self._compose()
        if batch:
            try:
                rows = self._compute([each.tokens for _, each in batch])
            except EngineBroken as error:
                self._fail(batch, error)
            else:
                self._accept(batch, rows)
        return bool(self._waiting)

    def stop(self) -> None:
        while turn := self._waiting.pop():
            self._emit([Cancelled(turn.id)])

    def _compose(self) -> EmbeddingBatch:
        """Take one input of each turn, in rounds over the tenants, until the batch is full."""
        batch: EmbeddingBatch = []
        batch_tokens = 0
        taken: Counter[int] = Counter()
        ready = self._waiting.copy()
        while batch_tokens < self._embedder.info.batch_tokens and (turn := ready.pop()):
            batch.append((turn, turn.missing.pop()))
            batch_tokens += len(batch[-1][1].tokens)
            taken[turn.id] += 1
            if turn.missing and taken[turn.id] != turn.batch_size:
                ready.put(turn.request.salt, turn)
        self._waiting.rotate()  # another tenant begins the next batch
        return batch

    def _compute(self, inputs: list[list[int]]) -> Matrix:
        if self._embedder.info.ranks:
            return np.array(self._embedder.rank(inputs), np.float32)[:, None]
        return self._embedder.embed(inputs)

    def _accept(self, batch: EmbeddingBatch, rows: Matrix) -> None:
        for (turn, computed), row in zip(batch, rows, strict=True):
            turn.accept(computed, row)
            if turn.request.reuse:
                self._cache.put(turn.request.salt, computed.key, row.copy())
        for turn in dict.fromkeys(turn for turn, _ in batch):
            if turn.is_complete:
                self._waiting.remove(turn.request.salt, turn)
                self._finish(turn)

    def _finish(self, turn: EmbeddingTurn) -> None:
        self._computed_tokens += turn.computed_tokens
        self._reused_tokens += turn.reused_tokens
        self._emit([turn.result()])

    def _fail(self, batch: EmbeddingBatch, error: EngineBroken) -> None:
        failure = ServerError(f"computing the embeddings failed: {error}").info
        for turn in dict.fromkeys(turn for turn, _ in batch):
            self._waiting.remove(turn.request.salt, turn)
            self._emit([Failed(turn.id, failure)])

    def stats(self) -> Stats:
        used_bytes = self._cache.rows.used_bytes
        return Stats(
            entries=0,
            pinned_entries=0,
            by_tier={},
            ram_bytes=used_bytes,
            disk_bytes=0,
            unique_bytes=used_bytes,
            logical_bytes=used_bytes,
            hits=self._statuses["hit"],
            partial_hits=self._statuses["partial_hit"],
            misses=self._statuses["miss"],
            evictions=0,
            ram_limit_bytes=self._cache.rows.limit_bytes,
            computed_tokens=self._computed_tokens,
            reused_tokens=self._reused_tokens,
            active_turns=len(self._waiting),
        )
