"""One step's work as one computation: MLX is told everything first and computes it at once."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

import mlx.core as mx
import numpy as np

from rekindle.engine.base import KvType, Row, Work
from rekindle.engine.mlx.batch import states
from rekindle.engine.mlx.batches import DecodingBatches
from rekindle.engine.mlx.sequences import MlxSequence


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

    def run(self) -> dict[int, Row]:
        """Compute; the logits behind each choice, by the identity of the work."""
        mx.eval([logits for _, logits in self._logits], self._states)
        return {
            id(item): row
            for items, logits in self._logits
            for item, row in zip(items, np.array(logits), strict=True)
        }
