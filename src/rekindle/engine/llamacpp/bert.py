"""Computes BERT embeddings on an x86 CPU with NumPy, whose BLAS uses AVX-512.

llama.cpp's kernels end at AVX2 and reach about half of the throughput (decision 32). Inputs are
packed into runs that fit in a core's cache, with a thread for each run. All threads share a single
run. Nothing is padded: products take all rows of a run, and attention takes rows of one length.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_info, threadpool_limits

from rekindle.engine.base import Matrix
from rekindle.engine.llamacpp import bindings
from rekindle.engine.llamacpp.model import GgufHeader, LlamaModel, TensorPlace, open_header
from rekindle.engine.llamacpp.thread_team import MIN_WORK, Share, ThreadTeam, alone

Tensors = Mapping[str, Matrix]
CALL_TOKENS = 512  # tokens of inputs that are computed together, unless one has more
SAFE_SCORE = 60  # exponentials of such scores, and their sums, stay in the range of float32
# gelu(x) = x (1 + tanh(a x + b x^3)) / 2. Inputs are scaled by the cube root of b, so that the
# inner part is x^3 + GELU_LINEAR x. The weights before and after account for the scale.
TANH_LINEAR = (2 / np.pi) ** 0.5
GELU_SCALE = (0.044715 * TANH_LINEAR) ** (1 / 3)
GELU_LINEAR = np.float32(TANH_LINEAR / GELU_SCALE)


@dataclass(frozen=True, slots=True)
class Tiling:
    """Sizes of products and runs.

    For small products OpenBLAS has AVX-512 kernels that read the weights in place. For larger ones
    it first copies them into another order, which for a dozen rows takes as long as the product. So
    weights are stored in panels of a few columns, and a few rows are multiplied by a panel at a
    time.
    """

    panel_columns: int
    max_multiplications: int | None  # in one product
    min_run_rows: int  # fewer rows do not pay for reading all weights
    max_run_rows: int


IN_PLACE = Tiling(32, 100**3, min_run_rows=32, max_run_rows=160)
COPIED = Tiling(256, None, min_run_rows=96, max_run_rows=512)


def tiling_here() -> Tiling:
    with_avx512 = ("SkylakeX", "Cooperlake", "SapphireRapids")  # architectures of OpenBLAS
    names = [each.get("architecture") for each in threadpool_info() if each["user_api"] == "blas"]
    return IN_PLACE if names and all(name in with_avx512 for name in names) else COPIED


class Weights:
    """Places the weights of all layers in one array. NumPy puts a large array into huge pages.
    Looking up 4 KiB pages would make products of a dozen rows a third slower."""

    def __init__(self, count: int, shards: int, tiling: Tiling) -> None:
        self.shards = shards
        self._tiling = tiling
        self._free: Matrix = np.empty(count, np.float32)

    def by_outputs(self, weight: Matrix, bias: Matrix) -> Linear:
        """Split the outputs into shards. `weight` has a row per output, as in the file."""
        split = weight.reshape(self.shards, -1, weight.shape[1])
        return self._linear(split, bias.reshape(self.shards, 1, -1))

    def whole(self, weight: Matrix, bias: Matrix) -> Linear:
        return self._linear(weight[None], bias[None, None])

    def by_inputs(self, weight: Matrix) -> Linear:
        """Split the inputs into shards. Each shard computes a summand of all outputs."""
        return self._linear(weight.reshape(len(weight), self.shards, -1).swapaxes(0, 1), None)

    def _linear(self, weight: Matrix, bias: Matrix | None) -> Linear:
        shards, outputs, inputs = weight.shape
        fitting = range(min(self._tiling.panel_columns, outputs), 0, -1)
        width = next(columns for columns in fitting if outputs % columns == 0)
        panels = weight.reshape(shards, -1, width, inputs).swapaxes(2, 3)
        max_rows = None
        if self._tiling.max_multiplications is not None:
            rows = self._tiling.max_multiplications // (width * inputs)
            max_rows = max(rows - rows % 6, 1)  # the kernels are fastest with a multiple of 6
        placed = self._free[: panels.size].reshape(panels.shape)
        placed[...] = panels
        self._free = self._free[panels.size :]
        return Linear(placed, bias, max_rows)


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear layer: weights in shards, and each shard in panels."""

    panels: Matrix  # shard, panel, input, column
    bias: Matrix | None  # shard, 1, column; None if shards are summands
    max_rows: int | None  # in one product

    def __call__(self, rows: Matrix, shards: slice, share: Share) -> Matrix:
        """Multiply rows by some shards. The rows are the same for all shards, or have a leading
        shard axis."""
        weights = self.panels[shards]
        count, panels, inputs, width = weights.shape
        made = np.empty((count, rows.shape[-2], panels * width), np.float32)
        own = np.broadcast_to(rows, (count, *rows.shape[-2:]))

        def compute(part: slice) -> None:
            for shard in range(part.start // panels, -(-part.stop // panels)):
                first = max(part.start - shard * panels, 0)
                last = min(part.stop - shard * panels, panels)
                columns = made[shard, :, first * width : last * width]
                self._multiply(own[shard], weights[shard, first:last], columns)

        # Reading the weights takes as long as multiplying 16 rows.
        share(compute, count * panels, inputs * width * (rows.shape[-2] + 16))
        if self.bias is not None:
            made += self.bias[shards]
        return made

    def _multiply(self, rows: Matrix, panels: Matrix, into: Matrix) -> None:
        count = len(rows)
        most = self.max_rows or count
        whole = count - count % most
        if whole:
            some = rows[:whole].reshape(-1, 1, most, rows.shape[1])
            np.matmul(some, panels, out=_by_panel(into[:whole], most, panels))
        if whole < count:
            rest = _by_panel(into[whole:], count - whole, panels)
            np.matmul(rows[whole:], panels, out=rest[0])


def _by_panel(values: Matrix, rows: int, panels: Matrix) -> Matrix:
    """View the same values by group of rows, panel, row and column."""
    return values.reshape(-1, rows, len(panels), panels.shape[2]).swapaxes(1, 2)


Stage = Callable[[slice, Share], None]  # computes some shards


@dataclass(frozen=True, slots=True)
class InputSpan:
    """Consecutive rows of inputs of equal length."""

    start: int
    inputs: int
    tokens: int  # of each input

    @property
    def stop(self) -> int:
        return self.start + self.inputs * self.tokens

    def of(self, rows: Matrix) -> Matrix:
        shape = (*rows.shape[:-2], self.inputs, self.tokens, rows.shape[-1])
        return rows[..., self.start : self.stop, :].reshape(shape)


@dataclass(frozen=True, slots=True)
class Norm:
    weight: Matrix
    bias: Matrix
    average: Matrix  # a row times this is its mean
    epsilon: np.float32

    @classmethod
    def of(cls, tensors: Tensors, name: str, epsilon: float) -> Norm:
        weight = tensors[f"{name}.weight"]
        average = np.full_like(weight, 1 / len(weight))
        return cls(weight, tensors[f"{name}.bias"], average, np.float32(epsilon))

    def __call__(self, rows: Matrix) -> Matrix:
        """Normalise in place."""
        width = np.float32(rows.shape[1])
        rows -= (rows @ self.average)[:, None]
        variance = np.vecdot(rows, rows) / width
        variance += self.epsilon
        rows /= np.sqrt(variance)[:, None]
        rows *= self.weight
        rows += self.bias
        return rows


@dataclass(frozen=True, slots=True)
class Layer:
    """A transformer layer. One thread can compute a shard: some heads and some inner columns."""

    shards: int
    heads: int  # of a shard
    attention_input: Linear  # queries, keys and values
    attention_output: Linear  # in one shard
    attention_norm: Norm
    up: Linear
    down: Linear
    bias: Matrix
    norm: Norm

    @classmethod
    def of(cls, tensors: Tensors, weights: Weights, *, heads: int, epsilon: float) -> Layer:
        width, shards = len(tensors["attn_q.bias"]), weights.shards
        one = np.float32(1)
        scales = {"attn_q": np.float32((width // heads) ** -0.5), "attn_k": one, "attn_v": one}
        weight, bias = (
            np.stack(
                [
                    (tensors[f"{name}.{part}"] * scale).reshape(shards, width // shards, -1)
                    for name, scale in scales.items()
                ],
                axis=1,
            )
            for part in ("weight", "bias")
        )
        up, down = tensors["ffn_up.weight"], tensors["ffn_down.weight"]
        scale = np.float32(GELU_SCALE)
        return cls(
            shards,
            heads // shards,
            weights.by_outputs(weight.reshape(-1, width), bias),
            weights.whole(tensors["attn_output.weight"], tensors["attn_output.bias"]),
            Norm.of(tensors, "attn_output_norm", epsilon),
            weights.by_outputs(up * scale, tensors["ffn_up.bias"] * scale),
            weights.by_inputs(down / (2 * scale)),
            tensors["ffn_down.bias"],
            Norm.of(tensors, "layer_output_norm", epsilon),
        )

    def __call__(self, rows: Matrix, spans: list[InputSpan], share: Share) -> Matrix:
        attended = self._attention(rows, spans, share)
        attended += rows
        rows = self.attention_norm(attended)
        outer = self._feed_forward(rows, share)
        outer += self.bias
        outer += rows
        return self.norm(outer)

    def _attention(self, rows: Matrix, spans: list[InputSpan], share: Share) -> Matrix:
        seen = np.empty_like(rows)

        def compute(shards: slice, share: Share) -> None:
            projected = self.attention_input(rows, shards, share)
            for span in spans:
                into = span.of(seen).reshape(span.inputs, span.tokens, self.shards, self.heads, -1)
                self._attend(span.of(projected), into[:, :, shards].transpose(2, 0, 3, 1, 4))

        self._staged(compute, len(rows), share)
        return _total(self.attention_output(seen, slice(0, 1), share))

    def _attend(self, projected: Matrix, seen: Matrix) -> None:
        shape = (*projected.shape[:3], 3, self.heads, -1)
        queries, keys, values = projected.reshape(shape).transpose(3, 0, 1, 4, 2, 5)
        scores = queries @ keys.swapaxes(-1, -2)
        if max(-scores.min(), scores.max()) > SAFE_SCORE:
            scores -= np.maximum.reduce(scores, axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        np.matmul(scores, values, out=seen)
        seen /= (scores @ np.ones(scores.shape[-1], np.float32))[..., None]

    def _feed_forward(self, rows: Matrix, share: Share) -> Matrix:
        """Compute the feed-forward part without its bias."""
        made: dict[int, Matrix] = {}

        def compute(shards: slice, share: Share) -> None:
            inner = _twice_gelu(self.up(rows, shards, share))
            made[shards.start] = _total(self.down(inner, shards, share))

        self._staged(compute, len(rows), share)
        return _total(made[first] for first in sorted(made))

    def _staged(self, compute: Stage, rows: int, share: Share) -> None:
        # With few rows only products are shared. The rest would wait for the interpreter lock.
        if rows < 48:
            compute(slice(0, self.shards), share)
        else:
            share(lambda shards: compute(shards, alone), self.shards, MIN_WORK)


def _total(parts: Iterable[Matrix]) -> Matrix:
    """Add up in place of the first."""
    total, *more = parts
    for part in more:
        total += part
    return total


def _twice_gelu(values: Matrix) -> Matrix:
    """Compute twice the GELU. The next weights contain the factor of a half."""
    inner = values * values
    inner += GELU_LINEAR
    inner *= values
    np.tanh(inner, out=inner)
    inner += 1
    inner *= values
    return inner


def packed(lengths: Seq[int], max_tokens: int, max_inputs: int) -> Iterator[list[int]]:
    """Yield the places of inputs to compute together, longest first. Calls take similar times, and
    the last one is short."""
    places: list[int] = []
    tokens = 0
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        if places and (tokens + lengths[place] > max_tokens or len(places) == max_inputs):
            yield places
            places, tokens = [], 0
        places.append(place)
        tokens += lengths[place]
    if places:
        yield places


class Bert:
    """A BERT model. `pool` makes one row of all rows of an input."""

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
        self._pool = pool
        self._tokens = tensors["token_embd.weight"]
        self._positions = tensors["position_embd.weight"] + tensors["token_types.weight"][0]
        self._norm = Norm.of(tensors, "token_embd_norm", epsilon)
        self._tiling = tiling_here()
        split = (heads, len(tensors["blk.0.ffn_up.bias"]))
        # More than 4 threads in one run would wait for the interpreter lock.
        fitting = range(min(threads, 4), 0, -1)
        shards = next(each for each in fitting if not any(size % each for size in split))
        blocks = [_block(tensors, layer) for layer in range(layers)]
        count = sum(each.size for block in blocks for each in block.values() if each.ndim == 2)
        weights = Weights(count, shards, self._tiling)
        self._layers = [Layer.of(each, weights, heads=heads, epsilon=epsilon) for each in blocks]
        self._team = ThreadTeam(threads, "bert")
        # For the whole process: BLAS threads wait busily for each other (see ThreadTeam).
        threadpool_limits(1, "blas")

    def pooled(self, inputs: Seq[Seq[int]]) -> Matrix:
        """Return one row per input, in their order."""
        lengths = [len(tokens) for tokens in inputs]
        share = max(-(-sum(lengths) // self._team.size), self._tiling.min_run_rows)
        runs = list(packed(lengths, min(share, self._tiling.max_run_rows), len(lengths)))
        made = np.empty((len(inputs), self._tokens.shape[1]), np.float32)
        if len(runs) == 1:
            made[runs[0]] = self._run([inputs[place] for place in runs[0]], self._team.share)
            return made
        waiting = iter(runs)

        def compute(_part: slice) -> None:
            for run in waiting:  # the threads share the iterator
                made[run] = self._run([inputs[place] for place in run], alone)

        self._team.share(compute, len(runs), MIN_WORK)
        return made

    def _run(self, inputs: Seq[Seq[int]], share: Share) -> Matrix:
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


def _spans(inputs: Seq[Seq[int]]) -> list[InputSpan]:
    spans: list[InputSpan] = []
    for tokens, group in groupby(map(len, inputs)):
        start = spans[-1].stop if spans else 0
        spans.append(InputSpan(start, sum(1 for _ in group), tokens))
    return spans


FLOATS = {bindings.GGML_TYPES["f32"]: np.float32, bindings.GGML_TYPES["f16"]: np.float16}
FAST_MACHINES = ("x86_64", "AMD64")  # elsewhere llama.cpp is as fast
BODY = ("token_embd.weight", "position_embd.weight", "token_types.weight", "token_embd_norm.weight")
LAYER = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_up", "ffn_down")
NORMS = ("attn_output_norm", "layer_output_norm")


POOLS: dict[int, Callable[[Matrix], Matrix]] = {
    bindings.POOLING_MEAN: lambda rows: rows.mean(axis=1),
    bindings.POOLING_CLS: lambda rows: rows[:, 0],
}


def open_bert(model: LlamaModel, path: Path, threads: int) -> Bert | None:
    """Load the model for NumPy. None if llama.cpp has to compute it: another kind of model,
    quantised, split, on a GPU, or not on x86."""
    pool = POOLS.get(model.pooling)
    if pool is None or model.on_gpu or platform.machine() not in FAST_MACHINES:
        return None
    with open_header(model.library, path) as header:
        is_bert = header.text("general.architecture") == "bert"
        places = _places(header, model.layers) if is_bert else None
        if places is None:
            return None
        width = header.number("bert.embedding_length")
        return Bert(
            {name: _read(path, place, name, width) for name, place in places.items()},
            layers=model.layers,
            heads=header.number("bert.attention.head_count"),
            epsilon=header.real("bert.attention.layer_norm_epsilon"),
            pool=pool,
            threads=threads,
        )


def _places(header: GgufHeader, layers: int) -> dict[str, TensorPlace] | None:
    """Find every tensor of a BERT. None unless all are there as floats."""
    names = [*BODY, "token_embd_norm.bias"]
    for layer in range(layers):
        blocks = (f"blk.{layer}.{name}" for name in (*LAYER, *NORMS))
        names += [f"{block}.{part}" for block in blocks for part in ("weight", "bias")]
    found = {name: header.place(name) for name in names}
    places = {name: each for name, each in found.items() if each and each.kind in FLOATS}
    return places if len(places) == len(names) else None


def _read(path: Path, place: TensorPlace, name: str, width: int) -> Matrix:
    kind = np.dtype(FLOATS[place.kind])
    count = place.size_bytes // kind.itemsize
    values = np.fromfile(path, kind, count, offset=place.offset_bytes).astype(np.float32)
    if name.endswith("_norm.weight") or name.endswith(".bias"):
        return values
    if name.endswith("ffn_down.weight"):
        return values.reshape(width, -1)
    return values.reshape(-1, width)
