"""Decodes sequences in batches of similar length, and runs the work of a step.

A batch stays between steps. A joining row is padded on the left to the longest. A leaving row takes
its state along. Neither changes what other rows attend to. A batch is as wide as its longest row,
so rows that would be mostly padding get another batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np

from rekindle.engine.base import KvType, Matrix, Row, Sequence, Work
from rekindle.engine.mlx.layers import STEP

Caches = list[Any]  # mlx_lm's cache of each layer, of one sequence


@dataclass(slots=True, eq=False, kw_only=True)
class MlxSequence(Sequence):
    """A sequence with its state in its own caches, in a row of a batch, or briefly in both."""

    caches: Caches | None  # None: only the batch has the current state
    batch: DecodingBatch | None = None

    def read(self) -> Caches:
        """Return the current state, for reading."""
        if self.caches is None:
            assert self.batch is not None
            self.caches = self.batch.extract(self)
        return self.caches

    def take(self) -> Caches:
        """Return the current state, for writing. It leaves its batch."""
        caches = self.read()
        self.leave_batch()
        return caches

    def leave_batch(self) -> None:
        if self.batch is not None:
            self.batch.discard(self)
            self.batch = None


def can_batch(caches: Caches) -> bool:
    """Return whether mlx_lm has a batch form of the cache of every layer."""
    return all(hasattr(cache, "merge") and can_batch(_parts(cache)) for cache in caches)


def states(caches: Caches) -> list[Any]:
    return [cache.state for cache in caches]


def _parts(cache: Any) -> Caches:
    return list(getattr(cache, "caches", ()))


class DecodingBatch:
    """A batch of sequences of one KV type, one row each."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._rows: list[MlxSequence | None] = []  # None: unused
        self._caches: Caches = []

    def step(self, tokens: dict[MlxSequence, int]) -> tuple[list[MlxSequence], mx.array]:
        """Append a token to each sequence. Returns the sequences of the rows, and lazy logits."""
        self._arrange(list(tokens))
        rows = [row for row in self._rows if row is not None]
        inputs = mx.array([[tokens[row]] for row in rows])
        logits = self._model(inputs, cache=self._caches)[:, -1, :]
        for row in rows:
            row.caches = None
        return rows, logits

    def states(self) -> list[Any]:
        return states(self._caches)

    def extract(self, sequence: MlxSequence) -> Caches:
        index = self._rows.index(sequence)
        caches = [cache.extract(index) for cache in self._caches]
        mx.eval(states(caches))  # otherwise the whole batch stays in memory
        return caches

    def discard(self, sequence: MlxSequence) -> None:
        """Mark a row as unused. The next step removes it."""
        self._rows[self._rows.index(sequence)] = None

    def dissolve(self) -> None:
        """Move every row back to its own caches."""
        self._arrange([])

    def shrink(self) -> None:
        self._arrange([row for row in self._rows if row is not None])
        mx.eval(self.states())

    def _arrange(self, wanted: Seq[MlxSequence]) -> None:
        """Make these sequences the rows."""
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


T = TypeVar("T")


def by_length(lengths: Mapping[T, int], spare: int, free: int | None = None) -> list[list[T]]:
    """Group by length, longest first, so that the padding of a group is at most its content plus
    `spare` tokens per row, and the padding of all groups at most `free` tokens. As all rows grow,
    the first group only gains members, so rows do not move back and forth."""
    groups: list[list[T]] = []
    width = held = padding = 0
    for each in sorted(lengths, key=lengths.__getitem__, reverse=True):
        length = lengths[each]
        padded = padding + width - length
        fits = groups and (free is None or padded <= free)
        if fits and (len(groups[-1]) + 1) * (width - spare) <= 2 * (held + length):
            groups[-1].append(each)
            held += length
            padding = padded
        else:
            groups.append([each])
            width = held = length
    return groups


class DecodingBatches:
    """The batches of one KV type."""

    def __init__(self, model: Any, *, pads: bool) -> None:
        """`pads` tells that state grows with the sequence, so shorter rows are padded."""
        self._model = model
        self._pads = pads
        self._batches: list[DecodingBatch] = []

    def arrange(
        self, lengths: Mapping[MlxSequence, int], free_tokens: int
    ) -> list[tuple[DecodingBatch | None, list[MlxSequence]]]:
        """Assign the sequences of a step to batches, by their lengths after it. Padding takes at
        most the free tokens of the KV budget. A single sequence needs no batch. All other sequences
        get their own caches back."""
        groups = by_length(lengths, STEP, free_tokens) if self._pads else [list(lengths)]
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
        for batch in self._batches:
            batch.shrink()

    def clear(self) -> None:
        """Drop every row."""
        self._batches = []


def _with_most_of(group: Seq[MlxSequence], batches: Seq[DecodingBatch]) -> DecodingBatch | None:
    """Return the batch into which the fewest sequences have to move."""
    rows = Counter(id(each.batch) for each in group)
    found = max(batches, key=lambda batch: rows[id(batch)], default=None)
    return found if found is not None and rows[id(found)] else None


def added_tokens(work: Seq[Work], kv_type: KvType) -> int:
    """Return what the shared sequences of a step take from the budget of a KV type."""
    shared = (item for item in work if not item.sequence.exact)
    return sum(len(item.tokens) for item in shared if item.sequence.kv_type == kv_type)


class Computation:
    """Collects the work of a step, and computes it in one evaluation.

    Prefill runs one sequence at a time, and decoding in batches. An exact sequence always computes
    alone.
    """

    def __init__(
        self,
        model: Any,
        batches: Mapping[KvType, DecodingBatches],
        free_tokens: Callable[[KvType], int],
    ) -> None:
        """`free_tokens` tells what is left of the KV budget before the step."""
        self._model = model
        self._batches = batches
        self._free_tokens = free_tokens
        self._decoding: dict[KvType, dict[MlxSequence, Work]] = {}
        self._logits: list[tuple[list[Work], mx.array]] = []
        self._states: list[Any] = []  # arrays that the next step starts from

    def add(self, work: Seq[Work]) -> None:
        for item in work:
            sequence = item.sequence
            assert isinstance(sequence, MlxSequence)
            if item.vectors is not None:
                logits = self._show(sequence, item.vectors)
                if item.sampler is not None:
                    self._choose([item], logits)
            elif item.sampler is None:
                self._append(sequence, item.tokens)
            elif sequence.exact:
                self._choose([item], self._append(sequence, item.tokens))
            else:
                # Logits of every prompt token would be a large part of prefill. So the last
                # token is left out, and decoded as the first row of the reply.
                if len(item.tokens) > 1:
                    self._append(sequence, item.tokens[:-1])
                self._decoding.setdefault(sequence.kv_type, {})[sequence] = item
        for kv_type, batches in self._batches.items():
            left_tokens = self._free_tokens(kv_type) - added_tokens(work, kv_type)
            self._decode_together(self._decoding.pop(kv_type, {}), batches, left_tokens)
        for items in self._decoding.values():
            for item in items.values():
                self._decode_alone(item)

    def _decode_together(
        self, items: dict[MlxSequence, Work], batches: DecodingBatches, free_tokens: int
    ) -> None:
        lengths = {each: each.length + len(item.tokens) for each, item in items.items()}
        for batch, group in batches.arrange(lengths, free_tokens):
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
        """Append tokens to one sequence, and return the logits of the last one."""
        caches = sequence.take()
        logits: mx.array = self._model(mx.array([list(tokens)]), cache=caches)[:, -1, :]
        self._states += states(caches)
        return logits

    def _show(self, sequence: MlxSequence, vectors: Matrix) -> mx.array:
        """Append vectors of an image to one sequence, and return the logits of the last one."""
        caches = sequence.take()
        logits: mx.array = self._model.show(vectors, cache=caches)[:, -1, :]
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
