"""A product of rows and weights, plus a bias, in the order that the BLAS of NumPy is fast with.

For a small product OpenBLAS has kernels, on CPUs with AVX-512, that read the weights where they
lie. For any other it copies them first into an order of its own, again for every product, which
for a dozen rows takes as long as the product. So weights are kept in panels of a few columns, one
after another, and a few rows at a time are multiplied by a panel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from threadpoolctl import threadpool_info

from rekindle.engine.base import Matrix
from rekindle.engine.team import Share

Tensors = Mapping[str, Matrix]
READING_ROWS = 16  # as many could be multiplied while weights are read


@dataclass(frozen=True, slots=True)
class Tiling:
    """How much a product takes at once, and how many rows make a run that a thread computes."""

    panel_columns: int
    most_multiplications: int | None  # of one product; None: as many as there are
    least_run_rows: int  # fewer do not pay for reading all weights
    most_run_rows: int


IN_PLACE = Tiling(32, 100**3, least_run_rows=32, most_run_rows=160)
COPIED = Tiling(256, None, least_run_rows=96, most_run_rows=512)
ROWS_STEP = 6  # the kernels are fastest with a multiple of so many rows
WITH_SMALL_KERNELS = ("SkylakeX", "Cooperlake", "SapphireRapids")  # any CPU that has AVX-512


def tiling_here() -> Tiling:
    names = [each.get("architecture") for each in threadpool_info() if each["user_api"] == "blas"]
    return IN_PLACE if names and all(name in WITH_SMALL_KERNELS for name in names) else COPIED


class Weights:
    """Puts the weights of all layers into one array: NumPy has a large one lie in huge pages, and
    a CPU that has to look up the address of every 4 KiB is a third slower with a dozen rows."""

    def __init__(self, count: int, shards: int, tiling: Tiling) -> None:
        self.shards = shards
        self._tiling = tiling
        self._free: Matrix = np.empty(count, np.float32)

    def by_outputs(self, weight: Matrix, bias: Matrix) -> Linear:
        """Each shard makes outputs of its own. `weight` has a row for each, as in a file."""
        split = weight.reshape(self.shards, -1, weight.shape[1])
        return self._linear(split, bias.reshape(self.shards, 1, -1))

    def whole(self, weight: Matrix, bias: Matrix) -> Linear:
        """In one shard."""
        return self._linear(weight[None], bias[None, None])

    def by_inputs(self, weight: Matrix) -> Linear:
        """Each shard makes a part of all outputs, of its own inputs."""
        return self._linear(weight.reshape(len(weight), self.shards, -1).swapaxes(0, 1), None)

    def _linear(self, weight: Matrix, bias: Matrix | None) -> Linear:
        shards, outputs, inputs = weight.shape
        fitting = range(min(self._tiling.panel_columns, outputs), 0, -1)
        width = next(columns for columns in fitting if outputs % columns == 0)
        panels = weight.reshape(shards, -1, width, inputs).swapaxes(2, 3)
        most_rows = None
        if self._tiling.most_multiplications is not None:
            rows = self._tiling.most_multiplications // (width * inputs)
            most_rows = max(rows - rows % ROWS_STEP, 1)
        placed = self._free[: panels.size].reshape(panels.shape)
        placed[...] = panels
        self._free = self._free[panels.size :]
        return Linear(placed, bias, most_rows)


@dataclass(frozen=True, slots=True)
class Linear:
    """Weights in shards, and those in panels."""

    panels: Matrix  # of shard, panel, input and column
    bias: Matrix | None  # of shard, row (one) and column; None where the shards are yet to be added
    most_rows: int | None  # of one product

    def __call__(self, rows: Matrix, shards: slice, share: Share) -> Matrix:
        """What these shards make of the rows: of shard, row and column. The rows are the same for
        all, or (of shard, row and column, too) each shard's own."""
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

        share(compute, count * panels, inputs * width * (rows.shape[-2] + READING_ROWS))
        if self.bias is not None:
            made += self.bias[shards]
        return made

    def _multiply(self, rows: Matrix, panels: Matrix, into: Matrix) -> None:
        count = len(rows)
        most = self.most_rows or count
        whole = count - count % most
        if whole:
            some = rows[:whole].reshape(-1, 1, most, rows.shape[1])
            np.matmul(some, panels, out=_by_panel(into[:whole], most, panels))
        if whole < count:
            rest = _by_panel(into[whole:], count - whole, panels)
            np.matmul(rows[whole:], panels, out=rest[0])


def _by_panel(values: Matrix, rows: int, panels: Matrix) -> Matrix:
    """A view of the same values: of so many rows, panel, row and column."""
    return values.reshape(-1, rows, len(panels), panels.shape[2]).swapaxes(1, 2)
