"""Reads the state of KV cells as llama.cpp writes it, and converts it to another cell type.

A state is a header and a section for each of the model's caches (two if the model has a sliding
window). A section holds the number of streams and cells, a record per cell, the layout of the rows,
the rotation sizes of keys and values, then the type, row size and rows of each layer's keys, and of
each layer's values. Quantised rows are rotated by a Hadamard transform first, which spreads
outliers. A rotation of 0 means none.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rekindle.engine.base import Blob, KvType
from rekindle.engine.llamacpp import bindings
from rekindle.errors import CorruptBlock, ModelError, NoMemory, Unsupported

#: Per KV type: number of values that share a scale, and bytes of such a group.
GROUPS: dict[KvType, tuple[int, int]] = {"f16": (1, 2), "q8_0": (32, 34), "q4_0": (32, 18)}
BITS: dict[KvType, int] = {"f16": 16, "q8_0": 8, "q4_0": 4}
_TYPE_NAMES = {bindings.GGML_TYPES[kv_type]: kv_type for kv_type in GROUPS}
_COUNTS = struct.Struct("<II")  # streams, cells
_LAYOUT = struct.Struct("<IIII")  # transposed values, layers, rotations of keys and of values
_ROWS = struct.Struct("<iQ")  # type, bytes of a row
#: Record of a cell with M-RoPE. Records of other models have no column, row and token.
_PLACED_CELL = np.dtype(
    [(name, "<i4") for name in ("position", "sequences", "column", "row", "token", "sequence")]
)
_CELL_BYTES = (12, _PLACED_CELL.itemsize)
_BY_8_BITS = np.dtype([("scale", "<f2"), ("values", "i1", 32)])
_BY_4_BITS = np.dtype([("scale", "<f2"), ("values", "u1", 16)])

Floats = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True, slots=True)
class LayerRows:
    kv_type: KvType
    width: int
    rotation: int

    @property
    def row_bytes(self) -> int:
        values, size_bytes = GROUPS[self.kv_type]
        return self.width // values * size_bytes


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """The layout of blocks of one KV type. A block of n tokens has `fixed + n * each` bytes, plus
    its checkpoint if it has one."""

    fixed: int
    each: int
    checkpoint: int  # bytes; 0: state can be truncated anywhere, so there are no checkpoints
    cell_bytes: int = 0  # of a cell's record
    sections: tuple[tuple[LayerRows, ...], ...] = ()  # empty: blocks cannot be converted

    def split(self, blob: Blob, tokens: int, *, resumable: bool) -> tuple[memoryview, memoryview]:
        """Split a block into its cells and its checkpoint. Checks the size before llama.cpp sees a
        byte."""
        view = memoryview(blob).cast("B")
        cells = self.fixed + tokens * self.each
        if len(view) != cells + resumable * self.checkpoint:
            raise CorruptBlock(f"a block of {tokens} tokens cannot have {len(view)} bytes")
        return view[:cells], view[cells:]

    def sized_as(self, kv_type: KvType) -> BlockLayout:
        """Return the sizes of cells of another type. Their rotations stay unknown."""
        sections = tuple(
            tuple(replace(rows, kv_type=kv_type) for rows in section) for section in self.sections
        )
        each = self.each + _rows_bytes(sections) - _rows_bytes(self.sections)
        return replace(self, each=each, sections=sections)


def _rows_bytes(sections: tuple[tuple[LayerRows, ...], ...]) -> int:
    return sum(rows.row_bytes for section in sections for rows in section)


def read_layout(one: Blob, two: Blob, checkpoint: int) -> BlockLayout:
    """Derive the layout from a block of one token and a block of two tokens."""
    sizes = BlockLayout(2 * len(one) - len(two), len(two) - len(one), checkpoint)
    for cell_bytes in _CELL_BYTES:
        try:
            sections = tuple(_read_section(memoryview(two), cell_bytes))
        except (struct.error, KeyError, CorruptBlock):
            continue
        return replace(sizes, cell_bytes=cell_bytes, sections=sections)
    return sizes


def _read_section(view: memoryview, cell_bytes: int) -> Iterator[tuple[LayerRows, ...]]:
    at = bindings.STATE_HEADER_BYTES
    while at < len(view):
        streams, cells = _COUNTS.unpack_from(view, at)
        at += _COUNTS.size + cells * cell_bytes
        transposed, layers, *rotations = _LAYOUT.unpack_from(view, at)
        at += _LAYOUT.size
        if streams != 1 or transposed or not 0 < layers <= len(view):
            raise CorruptBlock("a section of the state is malformed")
        section = []
        for rotation in (rotation for rotation in rotations for _ in range(layers)):
            type_id, row_bytes = _ROWS.unpack_from(view, at)
            at += _ROWS.size + cells * row_bytes
            kv_type = _TYPE_NAMES[type_id]
            values, size_bytes = GROUPS[kv_type]
            section.append(LayerRows(kv_type, row_bytes // size_bytes * values, rotation))
        yield tuple(section)
    if at != len(view):
        raise CorruptBlock("a section of the state is malformed")


def read_cells(state: Blob) -> np.ndarray[Any, Any]:
    """Return the records of the first section, with places. Cells of a picture have token -1."""
    view = memoryview(state).cast("B")
    _, cells = _COUNTS.unpack_from(view, bindings.STATE_HEADER_BYTES)
    at = bindings.STATE_HEADER_BYTES + _COUNTS.size
    if cells * _PLACED_CELL.itemsize > len(view) - at:
        raise CorruptBlock("a section of the state is malformed")
    return np.frombuffer(view, _PLACED_CELL, cells, at)


def cut_cells(state: memoryview, start: int, stop: int) -> bytes:
    """Keep the tokens [start, stop) of a state with places, and drop the others."""
    at = bindings.STATE_HEADER_BYTES
    written = [bytes(state[:at])]
    while at < len(state):
        streams, cells = _COUNTS.unpack_from(state, at)
        at += _COUNTS.size
        records = np.frombuffer(state, _PLACED_CELL, cells, at)
        order = np.lexsort([records[name] for name in ("column", "row", "position")])
        kept = np.sort(order[start:stop])  # the order of cells in memory
        at += records.nbytes
        _, layers, *_ = _LAYOUT.unpack_from(state, at)
        written += _COUNTS.pack(streams, len(kept)), records[kept].tobytes()
        written.append(bytes(state[at : at + _LAYOUT.size]))
        at += _LAYOUT.size
        for _ in range(2 * layers):  # keys, then values
            _, row_bytes = _ROWS.unpack_from(state, at)
            written.append(bytes(state[at : at + _ROWS.size]))
            at += _ROWS.size
            rows = np.frombuffer(state, np.uint8, cells * row_bytes, at)
            written.append(rows.reshape(cells, row_bytes)[kept].tobytes())
            at += rows.nbytes
    return b"".join(written)


def requantise_block(
    library: Any,
    source: BlockLayout,
    target: BlockLayout,
    blob: Blob,
    tokens: int,
    *,
    resumable: bool,
) -> bytes:
    """Convert the cells of a block to another layout. Its checkpoint stays as it is."""
    cells, checkpoint = source.split(blob, tokens, resumable=resumable)
    at = bindings.STATE_HEADER_BYTES
    written = [bytes(cells[:at])]
    for section, wanted in zip(source.sections, target.sections, strict=True):
        stop = at + _COUNTS.size + tokens * source.cell_bytes
        if _COUNTS.unpack_from(cells, at) != (1, tokens):
            raise CorruptBlock("the header of a block gives another number of tokens")
        layers = len(wanted) // 2
        written.append(bytes(cells[at:stop]))
        written.append(_LAYOUT.pack(0, layers, wanted[0].rotation, wanted[layers].rotation))
        at = stop + _LAYOUT.size
        for rows, new in zip(section, wanted, strict=True):
            start, at = at + _ROWS.size, at + _ROWS.size + tokens * rows.row_bytes
            values = _floats(rows, cells[start:at])
            if rows.rotation != new.rotation:
                values = _rotated(_rotated(values, rows.rotation), new.rotation)
            written.append(_ROWS.pack(bindings.GGML_TYPES[new.kv_type], new.row_bytes))
            written.append(_quantised(library, values, new))
    return b"".join((*written, checkpoint))


def _quantised(library: Any, values: Floats, rows: LayerRows) -> bytes:
    values = np.ascontiguousarray(values)
    count, type_id = values.size // rows.width, bindings.GGML_TYPES[rows.kv_type]
    raw = ctypes.create_string_buffer(count * rows.row_bytes)
    library.ggml_quantize_chunk(type_id, values.ctypes.data, raw, 0, count, rows.width, None)
    return raw.raw


def _floats(rows: LayerRows, raw: memoryview) -> Floats:
    if rows.kv_type == "f16":
        return np.frombuffer(raw, "<f2").astype(np.float32)
    groups = np.frombuffer(raw, _BY_8_BITS if rows.kv_type == "q8_0" else _BY_4_BITS)
    values = groups["values"]
    if rows.kv_type == "q4_0":
        values = np.concatenate((values & 15, values >> 4), axis=1).astype(np.int8) - 8
    scaled: Floats = groups["scale"].astype(np.float32)[:, None] * values
    return scaled


def _rotated(values: Floats, size: int) -> Floats:
    """Apply a Hadamard transform, which is its own inverse, to every `size` neighbours. It adds in
    a fixed order: the last bits of a matrix product would depend on the number of rows."""
    if not size:
        return values
    turned = values.reshape(-1, size).T.copy()  # so that whole rows are added
    others, near = np.empty_like(turned), 1
    while near < size:
        pairs, sums = (rows.reshape(-1, 2, near, rows.shape[1]) for rows in (turned, others))
        np.add(pairs[:, 0], pairs[:, 1], out=sums[:, 0])
        np.subtract(pairs[:, 0], pairs[:, 1], out=sums[:, 1])
        turned, others, near = others, turned, 2 * near
    return (turned.T * np.float32(size**-0.5)).reshape(-1)


class BlockLayouts:
    """The block layouts of all KV types. Rotations are measured when a type is first converted."""

    def __init__(
        self,
        library: Any,
        sizes: Mapping[KvType, BlockLayout],
        default: KvType,
        measure: Callable[[KvType], BlockLayout],
    ) -> None:
        self._library = library
        self._sizes = sizes
        self._measure = measure
        self._measured = {default: sizes[default]}

    def __getitem__(self, kv_type: KvType) -> BlockLayout:
        return self._sizes[kv_type]

    def requantise(
        self, blob: Blob, tokens: int, source: KvType, target: KvType, *, resumable: bool = False
    ) -> bytes:
        if BITS[target] >= BITS[source]:
            raise ValueError(f"{target} cells do not have fewer bits than {source} cells")
        layouts = self.measured(source), self.measured(target)
        return requantise_block(self._library, *layouts, blob, tokens, resumable=resumable)

    def measured(self, kv_type: KvType) -> BlockLayout:
        """Return the layout of a type with its rotations; raises NoMemory."""
        if kv_type not in self._measured:
            try:
                found = self._measure(kv_type)
            except ModelError:
                raise NoMemory.for_kv_type(needed_bytes=1) from None
            known = self._sizes[kv_type]
            if (found.fixed, found.each) != (known.fixed, known.each):
                raise Unsupported(f"llama.cpp stores {kv_type} cells in an unknown layout.")
            self._measured[kv_type] = found
        return self._measured[kv_type]
