"""Reads the tensors of a model folder chunk by chunk, and turns their values into ggml's types."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from rekindle.errors import ModelError
from rekindle.models.folder import INDEX, check_folder, read_json, weight_files
from rekindle.models.gguf_writer import Chunk, GgufTensor
from rekindle.models.safetensors import TensorInfo, read_header

Array = np.ndarray[Any, Any]
Change = Callable[[Array], Array]  # of the values of a chunk

CHUNK_BYTES = 32 << 20  # read at a time; the values take up to four times as much

#: The types of weights that are converted, with the type that NumPy reads them as.
READ_AS: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}
F32, F16, Q4_0, Q8_0, BF16 = 0, 1, 2, 8, 30  # ggml's type ids
KINDS = {"f32": F32, "f16": F16, "bf16": BF16, "q8_0": Q8_0, "q4_0": Q4_0}
SAME_BYTES = {("F32", F32), ("F16", F16), ("BF16", BF16)}
BLOCK = 32  # elements that share a scale in Q8_0 and Q4_0


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file of the folder. `info` was checked against the size of the file."""

    path: Path
    info: TensorInfo


def read_weights(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a complete folder by name; raises ModelError."""
    check_folder(folder)
    found = {
        name: StoredTensor(path, info)
        for path in weight_files(folder)
        for name, info in read_header(path).tensors.items()
    }
    index = folder / INDEX
    named = read_json(index)["weight_map"] if index.is_file() else {}
    if missing := [name for name in named if name not in found]:
        raise ModelError(
            f"{folder} lacks {listed(missing)}, which {INDEX} names: its weight files belong to "
            "another version of the model. Fetch the model again, into an empty folder."
        )
    if odd := sorted({each.info.dtype for each in found.values()} - READ_AS.keys()):
        raise ModelError(
            f"{folder} has weights of the types {', '.join(odd)}, so it is already quantised. Only "
            "weights in BF16, F16 or F32 are converted: give the original model, or a GGUF file."
        )
    return found


def listed(names: list[str], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def common_type(weights: dict[str, StoredTensor]) -> str:
    """Return the type of most weights, as `KINDS` calls it."""
    sizes: Counter[str] = Counter()
    for tensor in weights.values():
        sizes[tensor.info.dtype.lower()] += prod(tensor.info.shape)
    return sizes.most_common(1)[0][0]


def converted(
    name: str,
    sources: list[StoredTensor],
    kind: int,
    *,
    heads: int = 0,
    change: Change | None = None,
) -> GgufTensor:
    """Describe a tensor with the values of one source, or of equal ones stacked.

    `heads` reorders the rows of each head, `change` computes other values.
    """
    shape = sources[0].info.shape
    stacked = (len(sources), *shape) if len(sources) > 1 else shape
    read = partial(_chunks, name, sources, kind, heads, change)
    return GgufTensor(name, stacked, kind, read)


def _chunks(
    name: str, sources: list[StoredTensor], kind: int, heads: int, change: Change | None
) -> Iterator[Chunk]:
    for source in sources:
        exact = (source.info.dtype, kind) in SAME_BYTES and change is None
        for rows in _read_rows(source, whole=bool(heads)):
            if heads:
                rows = _paired(rows, heads)
            if not exact:
                values = _as_float(rows, source.info.dtype)
                rows = _encoded(name, change(values) if change else values, kind)
            yield np.ascontiguousarray(rows).data.cast("B")


def _read_rows(source: StoredTensor, *, whole: bool) -> Iterator[Array]:
    """Read some rows at a time. The file is read and not mapped, because a mapped file that shrinks
    kills the process."""
    info, dtype = source.info, READ_AS[source.info.dtype]
    columns = info.shape[-1] if info.shape else 1
    rows = prod(info.shape) // columns if columns else 0
    step = rows if whole else max(1, CHUNK_BYTES // (columns * dtype.itemsize or 1))
    with source.path.open("rb") as file:
        file.seek(info.start)
        for first in range(0, rows, step):
            count = min(step, rows - first)
            raw = file.read(count * columns * dtype.itemsize)
            if len(raw) < count * columns * dtype.itemsize:
                raise ModelError(f"{source.path} became shorter while it was converted. Try again.")
            yield np.frombuffer(raw, dtype).reshape(count, columns)


def _paired(rows: Array, heads: int) -> Array:
    """Move the two rows that a rotation combines next to each other.

    Safetensors files have the first halves of all pairs of a head, then the second halves.
    """
    if rows.shape[0] == 1:  # a bias
        return _paired(rows.T, heads).T
    halves = rows.reshape(heads, 2, -1, rows.shape[-1])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def _as_float(values: Array, dtype: str) -> Array:
    if dtype == "BF16":
        wide: Array = (values.astype(np.uint32) << 16).view(np.float32)
        return wide
    return values.astype(np.float32)


def _encoded(name: str, values: Array, kind: int) -> Array:
    if kind == F32:
        return values
    if kind == F16:
        with np.errstate(over="ignore"):
            half = values.astype(np.float16)
        if not np.isfinite(half).all():
            raise ModelError(f"{name} has values that F16 cannot hold. Give --quant bf16.")
        return half
    from gguf import GGMLQuantizationType, quants

    coded: Array = quants.quantize(values, GGMLQuantizationType(kind))
    return coded


def kind_of_matrix(quant: str, shape: tuple[int, ...], *, is_vocabulary: bool) -> int:
    """Return ggml's type for a matrix. Rows that are no whole blocks stay F16, and embeddings are
    never in four bits, because that costs the most quality."""
    kind = KINDS[quant]
    if kind in (Q8_0, Q4_0) and shape[-1] % BLOCK:
        return F16
    return Q8_0 if kind == Q4_0 and is_vocabulary else kind
