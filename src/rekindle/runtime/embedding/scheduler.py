"""Which inputs are computed next: some of every waiting request, the tenants in turn."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable

import numpy as np

from rekindle.engine.base import Embedder, Matrix
from rekindle.errors import EngineBroken, ServerError
from rekindle.protocol.admin import Stats
from rekindle.protocol.events import Cancelled, Event, Failed, Started
from rekindle.runtime.embedding.turn import EmbeddingTurn, Input

# ----------------------------------------------------------------------
# Rows that were computed before, under a byte budget, each tenant's apart.

OVERHEAD_BYTES = 300  # of an entry, beside its key and its row


class VectorCache:
    """The least recently used row goes first."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._rows: OrderedDict[tuple[bytes, bytes], Matrix] = OrderedDict()

    def __len__(self) -> int:
        return len(self._rows)

    def get(self, salt: bytes, keys: Iterable[bytes]) -> dict[bytes, Matrix]:
        """Those of a tenant's rows that are there, by their keys; they count as used."""
        found = {}
        for key in keys:
            row = self._rows.get((salt, key))
            if row is not None:
                self._rows.move_to_end((salt, key))
                found[key] = row
        return found

    def put(self, salt: bytes, key: bytes, row: Matrix) -> None:
        self._forget((salt, key))
        self._rows[salt, key] = row
        self.used_bytes += _size_bytes(key, row)
        while self.used_bytes > self.limit_bytes:
            self._forget(next(iter(self._rows)))

    def _forget(self, name: tuple[bytes, bytes]) -> None:
        row = self._rows.pop(name, None)
        if row is not None:
            self.used_bytes -= _size_bytes(name[1], row)


def _size_bytes(key: bytes, row: Matrix) -> int:
    return len(key) + row.nbytes + OVERHEAD_BYTES


Batch = list[tuple[EmbeddingTurn, Input]]


class EmbeddingScheduler:
    """A turn ends in exactly one event. A step computes inputs of several requests together, so a
    short one does not wait for the end of a long one, and many short ones are as fast as one."""

    def __init__(
        self, embedder: Embedder, cache: VectorCache, emit: Callable[[list[Event]], None]
    ) -> None:
        self._embedder = embedder
        self._cache = cache
        self._emit = emit
        self._waiting: OrderedDict[bytes, deque[EmbeddingTurn]] = OrderedDict()  # by tenant
        self._statuses: Counter[str] = Counter()
        self._computed_tokens = 0
        self._reused_tokens = 0

    @property
    def turns(self) -> int:
        return sum(map(len, self._waiting.values()))

    def submit(self, turn: EmbeddingTurn) -> None:
        """Take in a turn; one whose rows are all known is answered at once."""
        request = turn.request
        if request.reuse:
            keys = [each.key for each in turn.missing]
            known = self._cache.get(request.salt, keys)
            status = "hit" if len(known) == len(keys) else "partial" if known else "miss"
            self._statuses[status] += 1
            turn.know(known)
        missing_tokens = sum(len(each.tokens) for each in turn.missing)
        reused_tokens = turn.prompt_tokens - missing_tokens
        self._emit([Started(turn.id, turn.prompt_tokens, reused_tokens)])
        if turn.is_whole:
            self._finish(turn)
        else:
            self._waiting.setdefault(request.salt, deque()).append(turn)

    def cancel(self, number: int) -> None:
        for salt, turns in list(self._waiting.items()):
            for turn in turns:
                if turn.id == number:
                    self._remove(salt, turn)
                    self._emit([Cancelled(number)])
                    return

    def step(self) -> bool:
        """Compute a batch; whether there is more to do."""
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
        for turns in self._waiting.values():
            self._emit([Cancelled(turn.id) for turn in turns])
        self._waiting.clear()

    def _compose(self) -> Batch:
        """One input of each turn, tenant after tenant, until there are enough."""
        batch: Batch = []
        tokens = 0
        taken: Counter[int] = Counter()
        ready = OrderedDict((salt, deque(turns)) for salt, turns in self._waiting.items())
        while ready and tokens < self._embedder.info.batch_tokens:
            salt, turns = ready.popitem(last=False)
            turn = turns.popleft()
            batch.append((turn, turn.missing.pop()))
            tokens += len(batch[-1][1].tokens)
            taken[turn.id] += 1
            if turn.missing and taken[turn.id] != turn.at_once:
                turns.append(turn)
            if turns:
                ready[salt] = turns
        if self._waiting:
            self._waiting.move_to_end(next(iter(self._waiting)))  # another begins the next batch
        return batch

    def _compute(self, inputs: list[list[int]]) -> Matrix:
        if self._embedder.info.ranks:
            return np.array(self._embedder.rank(inputs), np.float32)[:, None]
        return self._embedder.embed(inputs)

    def _accept(self, batch: Batch, rows: Matrix) -> None:
        for (turn, computed), row in zip(batch, rows, strict=True):
            turn.accept(computed, row)
            if turn.request.reuse:
                self._cache.put(turn.request.salt, computed.key, row.copy())
        for turn in {id(turn): turn for turn, _ in batch}.values():
            if turn.is_whole:
                self._remove(turn.request.salt, turn)
                self._finish(turn)

    def _finish(self, turn: EmbeddingTurn) -> None:
        self._computed_tokens += turn.computed_tokens
        self._reused_tokens += turn.reused_tokens
        self._emit([turn.result()])

    def _fail(self, batch: Batch, error: EngineBroken) -> None:
        failure = ServerError(f"computing the embeddings failed: {error}").info
        for turn in {id(turn): turn for turn, _ in batch}.values():
            self._remove(turn.request.salt, turn)
            self._emit([Failed(turn.id, failure)])

    def _remove(self, salt: bytes, turn: EmbeddingTurn) -> None:
        turns = self._waiting[salt]
        turns.remove(turn)
        if not turns:
            del self._waiting[salt]

    def stats(self) -> Stats:
        """Figures of all tenants together."""
        return Stats(
            entries=0,
            pinned_entries=0,
            by_tier={},
            ram_bytes=self._cache.used_bytes,
            disk_bytes=0,
            unique_bytes=self._cache.used_bytes,
            logical_bytes=self._cache.used_bytes,
            hits=self._statuses["hit"],
            partial_hits=self._statuses["partial"],
            misses=self._statuses["miss"],
            evictions=0,
            ram_limit_bytes=self._cache.limit_bytes,
            computed_tokens=self._computed_tokens,
            reused_tokens=self._reused_tokens,
            active_turns=self.turns,
        )
