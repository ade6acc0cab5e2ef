"""The batches in which sequences of one KV type decode, each of sequences of similar length.

A batch is as wide as its longest row. One long row among many short ones would take the memory of
as many long ones, so those that would be mostly padding have a batch of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any, TypeVar

from rekindle.engine.mlx.batch import DecodingBatch
from rekindle.engine.mlx.sequences import MlxSequence

#: Padding of each row that is worth no other batch: what mlx_lm's buffers grow by.
SPARE_TOKENS = 256

T = TypeVar("T")


def by_length(lengths: Mapping[T, int], spare: int) -> list[list[T]]:
    """Groups, the longest first, in each of which padding is at most what its rows hold and
    `spare` tokens a row. As all of them grow, the first group only gains: there is no going to
    and fro."""
    groups: list[list[T]] = []
    width = held = 0
    for each in sorted(lengths, key=lengths.__getitem__, reverse=True):
        length = lengths[each]
        if groups and (len(groups[-1]) + 1) * (width - spare) <= 2 * (held + length):
            groups[-1].append(each)
            held += length
        else:
            groups.append([each])
            width = held = length
    return groups


class DecodingBatches:
    def __init__(self, model: Any, *, pads: bool) -> None:
        """`pads`: state grows with the length of a sequence, and shorter rows are padded."""
        self._model = model
        self._pads = pads
        self._batches: list[DecodingBatch] = []

    def arrange(
        self, lengths: Mapping[MlxSequence, int]
    ) -> list[tuple[DecodingBatch | None, list[MlxSequence]]]:
        """Who decodes with whom in a step that makes sequences so long, and in which batch; one
        alone needs none. All others have their own caches again."""
        groups = by_length(lengths, SPARE_TOKENS) if self._pads else [list(lengths)]
        free = self._batches
        self._batches = []
        arranged: list[tuple[DecodingBatch | None, list[MlxSequence]]] = []
        for group in groups:
            batch = None
            if len(group) > 1:
                batch = _with_most_of(group, free) or DecodingBatch(self._model)
                self._batches.append(batch)
                free = [each for each in free if each is not batch]
            arranged.append((batch, group))
        for batch in free:
            batch.dissolve()
        return arranged

    def shrink(self) -> None:
        """Remove the rows of sequences that have left."""
        for batch in self._batches:
            batch.shrink()


def _with_most_of(group: Seq[MlxSequence], batches: Seq[DecodingBatch]) -> DecodingBatch | None:
    """Where the fewest of them have to move to."""
    rows = Counter(id(each.batch) for each in group)
    found = max(batches, key=lambda batch: rows[id(batch)], default=None)
    return found if found is not None and rows[id(found)] else None
