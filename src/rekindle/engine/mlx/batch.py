"""Sequences that decode together: one row each of mlx_lm's batch caches.

The batch stays between steps. Who joins is padded on the left to the longest, who leaves takes its
row along into caches of its own; neither changes what the others attend to.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import mlx.core as mx

from rekindle.engine.mlx.sequences import Caches, MlxSequence


def can_batch(caches: Caches) -> bool:
    """Whether mlx_lm has a batch form of every layer's cache."""
    return all(hasattr(cache, "merge") and can_batch(_parts(cache)) for cache in caches)


def states(caches: Caches) -> list[Any]:
    """The arrays in caches, to be computed."""
    return [cache.state for cache in caches]


def _parts(cache: Any) -> Caches:
    return list(getattr(cache, "caches", ()))


class DecodingBatch:
    """Rows of sequences of one KV type."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._rows: list[MlxSequence | None] = []  # None: it has left, its row is still there
        self._caches: Caches = []

    def step(self, tokens: dict[MlxSequence, int]) -> tuple[list[MlxSequence], mx.array]:
        """Append a token to each of these sequences, and to no others; the rows of the logits, not
        yet computed, belong to the sequences that are returned."""
        self._arrange(list(tokens))
        rows = [row for row in self._rows if row is not None]
        inputs = mx.array([[tokens[row]] for row in rows])
        logits = self._model(inputs, cache=self._caches)[:, -1, :]
        for row in rows:
            row.caches = None
        return rows, logits

    def states(self) -> list[Any]:
        """What has to be computed for the next step to begin from here."""
        return states(self._caches)

    def extract(self, sequence: MlxSequence) -> Caches:
        """The state of one row, copied."""
        index = self._rows.index(sequence)
        caches = [cache.extract(index) for cache in self._caches]
        mx.eval(states(caches))  # else the whole batch stays in memory with it
        return caches

    def discard(self, sequence: MlxSequence) -> None:
        """Its row is of no use any more; it is removed with the next step."""
        self._rows[self._rows.index(sequence)] = None

    def dissolve(self) -> None:
        """Give every row its own caches back."""
        self._arrange([])

    def shrink(self) -> None:
        """Remove the rows of sequences that have left."""
        self._arrange([row for row in self._rows if row is not None])
        mx.eval(self.states())

    def _arrange(self, wanted: Seq[MlxSequence]) -> None:
        """Make these the rows."""
        staying = set(wanted)
        for row in self._rows:
            if row is not None and row not in staying:
                row.take()
        self._filter([n for n, row in enumerate(self._rows) if row is not None])
        if joining := [each for each in wanted if each.batch is not self]:
            self._extend(joining)

    def _filter(self, kept: list[int]) -> None:
        if len(kept) == len(self._rows):
            return
        self._rows = [self._rows[n] for n in kept]
        if not kept:
            self._caches = []
        for cache in self._caches:
            cache.filter(kept)

    def _extend(self, joining: Seq[MlxSequence]) -> None:
        layers = zip(*(sequence.take() for sequence in joining), strict=True)
        merged = [caches[0].merge(caches) for caches in layers]
        if self._caches:
            for mine, theirs in zip(self._caches, merged, strict=True):
                mine.extend(theirs)
        else:
            self._caches = merged
        self._rows += joining
        for sequence in joining:
            sequence.batch = self
