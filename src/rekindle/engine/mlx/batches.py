"""The batches in which sequences of one KV type decode, each of sequences of similar length.

A batch is as wide as its longest row. One long row among many short ones would take the memory of
as many long ones, so those that would be mostly padding have a batch of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np

from rekindle.engine.base import KvType, Row, Work
from rekindle.engine.mlx.sequences import Caches, MlxSequence

# ----------------------------------------------------------------------
# Sequences that decode together: one row each of mlx_lm's batch caches.
#
# The batch stays between steps. Who joins is padded on the left to the longest, who leaves takes
# its row along into caches of its own; neither changes what the others attend to.


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

    def clear(self) -> None:
        """Drop every row."""
        self._batches = []


def _with_most_of(group: Seq[MlxSequence], batches: Seq[DecodingBatch]) -> DecodingBatch | None:
    """Where the fewest of them have to move to."""
    rows = Counter(id(each.batch) for each in group)
    found = max(batches, key=lambda batch: rows[id(batch)], default=None)
    return found if found is not None and rows[id(found)] else None


# ----------------------------------------------------------------------
# One step's work as one computation: MLX is told everything first and computes it at once.


class Computation:
    """Prompts are read a sequence at a time; the sequences that decode do so together. An exact
    sequence has every step to itself, and whole."""

    def __init__(self, model: Any, batches: Mapping[KvType, DecodingBatches]) -> None:
        self._model = model
        self._batches = batches
        self._decoding: dict[KvType, dict[MlxSequence, Work]] = {}
        self._logits: list[tuple[list[Work], mx.array]] = []  # a row for each piece of work
        self._states: list[Any] = []  # what the next step begins from

    def add(self, work: Seq[Work]) -> None:
        for item in work:
            sequence = item.sequence
            assert isinstance(sequence, MlxSequence)
            if item.sampler is None:
                self._append(sequence, item.tokens)
            elif sequence.exact:
                self._choose([item], self._append(sequence, item.tokens))
            else:
                # Logits of every token of a prompt are a large part of what it costs: here they
                # are of the last one alone, which is the first row that the reply decodes.
                if len(item.tokens) > 1:
                    self._append(sequence, item.tokens[:-1])
                self._decoding.setdefault(sequence.kv_type, {})[sequence] = item
        for kv_type, batches in self._batches.items():
            self._decode_together(self._decoding.pop(kv_type, {}), batches)
        for items in self._decoding.values():
            for item in items.values():
                self._decode_alone(item)

    def _decode_together(self, items: dict[MlxSequence, Work], batches: DecodingBatches) -> None:
        lengths = {each: each.length + len(item.tokens) for each, item in items.items()}
        for batch, group in batches.arrange(lengths):
            if batch is None:
                for each in group:
                    self._decode_alone(items[each])
                continue
            rows, logits = batch.step({each: items[each].tokens[-1] for each in group})
            self._choose([items[row] for row in rows], logits)
            self._states += batch.states()

    def _decode_alone(self, item: Work) -> None:
        assert isinstance(item.sequence, MlxSequence)
        self._choose([item], self._append(item.sequence, item.tokens[-1:]))

    def _append(self, sequence: MlxSequence, tokens: Seq[int]) -> mx.array:
        """Tokens of one sequence alone; the logits of the last, which nobody has to want."""
        caches = sequence.take()
        logits: mx.array = self._model(mx.array([list(tokens)]), cache=caches)[:, -1, :]
        self._states += states(caches)
        return logits

    def _choose(self, items: list[Work], logits: mx.array) -> None:
        self._logits.append((items, logits.astype(mx.float32)))

    def start(self) -> None:
        """Hand everything to MLX, which computes it in the background."""
        mx.async_eval([logits for _, logits in self._logits], self._states)

    def wait(self) -> dict[int, Row]:
        """Wait for the step. Returns the logits behind each choice, by the id() of its work."""
        mx.eval([logits for _, logits in self._logits], self._states)
        return {
            id(item): row
            for items, logits in self._logits
            for item, row in zip(items, np.array(logits), strict=True)
        }
