"""BERT on a CPU, with NumPy: its matrix products use whatever the CPU has, where the library's
kernels end at AVX2.

Inputs are computed side by side, a thread for each run of about as many rows as fit in a core's
cache; a run that is alone has all threads for each of its steps. No row is padding: products take
all rows of a run together, attention those of one length.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from itertools import groupby

import numpy as np
from threadpoolctl import threadpool_limits

from rekindle.engine.base import Matrix
from rekindle.engine.llamacpp.bert_layer import Layer, Norm, Span
from rekindle.engine.llamacpp.linear import Tensors, Weights, tiling_here
from rekindle.engine.llamacpp.packing import packed
from rekindle.engine.team import LEAST_WORK, Share, Team, alone

MOST_SHARDS = 4  # a lone run has no use for more threads: it would wait for Python's lock


class Bert:
    def __init__(
        self,
        tensors: Tensors,
        *,
        layers: int,
        heads: int,
        epsilon: float,
        pool: Callable[[Matrix], Matrix],
        threads: int,
    ) -> None:
        """`pool` makes one row of all the rows of an input."""
        self._pool = pool
        self._tokens = tensors["token_embd.weight"]
        self._positions = tensors["position_embd.weight"] + tensors["token_types.weight"][0]
        self._norm = Norm.of(tensors, "token_embd_norm", epsilon)
        self._tiling = tiling_here()
        split = (heads, len(tensors["blk.0.ffn_up.bias"]))
        fitting = range(min(threads, MOST_SHARDS), 0, -1)
        shards = next(each for each in fitting if not any(size % each for size in split))
        blocks = [_block(tensors, layer) for layer in range(layers)]
        count = sum(each.size for block in blocks for each in block.values() if each.ndim == 2)
        weights = Weights(count, shards, self._tiling)
        self._layers = [Layer.of(each, weights, heads=heads, epsilon=epsilon) for each in blocks]
        self._team = Team(threads, "bert")
        # For good: BLAS threads of its own wait busily for each other (see Team).
        threadpool_limits(1, "blas")

    def pooled(self, inputs: Seq[Seq[int]]) -> Matrix:
        """One row of each input, in their order."""
        lengths = [len(tokens) for tokens in inputs]
        share = max(-(-sum(lengths) // self._team.size), self._tiling.least_run_rows)
        runs = list(packed(lengths, min(share, self._tiling.most_run_rows), len(lengths)))
        made = np.empty((len(inputs), self._tokens.shape[1]), np.float32)
        if len(runs) == 1:
            made[runs[0]] = self._run([inputs[place] for place in runs[0]], self._team.share)
            return made
        waiting = iter(runs)

        def compute(_part: slice) -> None:
            for run in waiting:  # of all threads, each run once
                made[run] = self._run([inputs[place] for place in run], alone)

        self._team.share(compute, len(runs), LEAST_WORK)
        return made

    def _run(self, inputs: Seq[Seq[int]], share: Share) -> Matrix:
        """The inputs are in order of their lengths."""
        spans = _spans(inputs)
        rows = self._tokens[np.concatenate([np.asarray(tokens) for tokens in inputs])]
        for span in spans:
            part = span.of(rows)
            part += self._positions[: span.tokens]
        rows = self._norm(rows)
        for layer in self._layers:
            rows = layer(rows, spans, share)
        return np.concatenate([self._pool(span.of(rows)) for span in spans])

    def close(self) -> None:
        self._team.close()


def _block(tensors: Tensors, layer: int) -> Tensors:
    prefix = f"blk.{layer}."
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def _spans(inputs: Seq[Seq[int]]) -> list[Span]:
    spans: list[Span] = []
    for tokens, group in groupby(map(len, inputs)):
        start = spans[-1].stop if spans else 0
        spans.append(Span(start, sum(1 for _ in group), tokens))
    return spans
