"""The finished sequences of one pool: which there are, and how they are gone on from and closed."""

from __future__ import annotations

from collections.abc import Iterator

from rekindle.engine.base import Engine, Sequence
from rekindle.runtime.idle_exports import IdleExports
from rekindle.runtime.idle_ranking import IdleRanking
from rekindle.runtime.offload import IdleSequence
from rekindle.runtime.superseded import Superseded


class IdleSequences:
    """Least recently used first; each is ranked as long as it is here."""

    def __init__(self, engine: Engine, exports: IdleExports, ranking: IdleRanking) -> None:
        self.superseded = Superseded(engine)
        self._engine = engine
        self._exports = exports
        self._ranking = ranking
        self._items: list[IdleSequence] = []

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[IdleSequence]:
        return iter(self._items)

    def __reversed__(self) -> Iterator[IdleSequence]:
        return reversed(self._items)

    def __contains__(self, idle: object) -> bool:
        return idle in self._items

    @property
    def in_pool(self) -> Iterator[IdleSequence]:
        """Those that hold cells."""
        return (idle for idle in self._items if not idle.sequence.is_parked)

    def add(self, idle: IdleSequence) -> None:
        self._items.append(idle)
        self._ranking.add(idle)

    def close(self, idle: IdleSequence, *, may_return: bool = True) -> None:
        self._exports.close_copy(idle)
        self._items.remove(idle)
        self._ranking.remove(idle, may_return=may_return)
        self._engine.close_sequence(idle.sequence)

    def supersedes(self, source: Sequence, shared_tokens: int, namespace: bytes) -> bool:
        """Whether a sequence that shares so many tokens takes the place of its source: that lives
        on in the new one if it was shared to its end, and by the same tenant."""
        return any(
            idle.sequence is source
            and shared_tokens >= len(idle.tokens)
            and idle.namespace == namespace
            for idle in self._items
        )

    def supersede(self, source: Sequence, shared_tokens: int, namespace: bytes) -> bool:
        """A turn is about to go on from a source. True: in the source itself, which has no other
        use and is the turn's from now on: marking its cells for another sequence and unmarking them
        for this one takes milliseconds. One that is parked has to be copied."""
        is_over = self.supersedes(source, shared_tokens, namespace)
        for idle in self._items:
            if idle.sequence is source:
                self._items.remove(idle)
                if not is_over:
                    idle.is_leaving = False
                    self._items.append(idle)
                    return False
                self._ranking.remove(idle)
                self._exports.close_copy(idle)
                if source.is_parked:
                    self.superseded.add(source)
                return not source.is_parked
        return False

    def clear(self) -> None:
        """The engine has lost them."""
        self._items.clear()
        self.superseded.clear()
        self._ranking.clear()
        self._exports.copied = None

    def count_rows(self, rows: int) -> None:
        """Other turns have computed so many rows beside these sequences."""
        for idle in self._items:
            idle.rows_meanwhile += rows
