"""Defines the KV types of a model, and converts blocks from one type to another.

Only keys and values of layers that store every position are quantised. Windows and recurrent state
stay as they are. Groups lie within one position of one head, so quantising a block gives the same
bytes as quantising the whole cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from blake3 import blake3
from mlx_lm.models.cache import CacheList, KVCache, make_prompt_cache

from rekindle.engine.base import Blob, KvLayout, KvType
from rekindle.engine.mlx.layers import (
    Layer,
    Part,
    Positions,
    Reader,
    Recurrent,
    Rows,
    check_kinds,
    joined,
)
from rekindle.engine.mlx.positions import PositionCache
from rekindle.engine.mlx.quantized_batch import MergingQuantizedKVCache
from rekindle.engine.mlx.state import StateLayout, block_header, share
from rekindle.errors import CorruptBlock, ModelError

_FLOAT_NAMES: dict[mx.Dtype, KvType] = {mx.float32: "f32", mx.bfloat16: "bf16", mx.float16: "f16"}
_PROBE = [0] * 16  # tokens of a step that is never computed


@dataclass(frozen=True, slots=True)
class Quantisation:
    """Values of `bits` bits. `group_size` values share a scale and a bias."""

    bits: int
    group_size: int

    @property
    def name(self) -> KvType:
        return f"q{self.bits}_g{self.group_size}"

    def fits(self, layer: Positions) -> bool:
        return all(rows.width and rows.width % self.group_size == 0 for rows in layer.rows)

    def _rows(self, rows: Rows) -> tuple[Rows, Rows, Rows]:
        """Return the shapes of packed values, scales and biases of an array of keys or values."""
        groups = Rows(rows.heads, rows.width // self.group_size, rows.dtype)
        packed = Rows(rows.heads, rows.width * self.bits // 32, mx.uint32)
        return packed, groups, groups

    def layer(self, layer: Layer) -> Layer:
        if not isinstance(layer, Positions) or layer.has_integers:
            return layer
        return Positions(tuple(each for rows in layer.rows for each in self._rows(rows)))

    def cache(self, cache: Any) -> Any:
        if isinstance(cache, CacheList):
            return CacheList(*map(self.cache, cache.caches))
        if isinstance(cache, KVCache) and not isinstance(cache, PositionCache):
            return MergingQuantizedKVCache(group_size=self.group_size, bits=self.bits)
        return cache

    def quantised(self, array: mx.array) -> list[mx.array]:
        return list(mx.quantize(array, group_size=self.group_size, bits=self.bits))

    def floats(self, arrays: list[mx.array]) -> list[mx.array]:
        """Restore the arrays of keys and values, from three arrays each."""
        triples = zip(arrays[::3], arrays[1::3], arrays[2::3], strict=True)
        return [
            mx.dequantize(packed, scales, biases, group_size=self.group_size, bits=self.bits)
            for packed, scales, biases in triples
        ]


#: For equal bits, the smaller layout comes first.
QUANTISATIONS = tuple(Quantisation(bits, group) for bits in (8, 4) for group in (128, 64, 32))


class Layouts:
    """The layouts of all KV types of a loaded model."""

    def __init__(self, model: Any, fingerprint: bytes, *, can_quantise: bool = True) -> None:
        self._model = model
        default = _measured(model, make_prompt_cache(model))
        self.default = _FLOAT_NAMES[_dtype(default)]
        fitting = _fitting(model, default) if can_quantise else ()
        self._quantisations = {each.name: each for each in fitting}
        self._layouts = {self.default: default}
        for name, quantisation in self._quantisations.items():
            self._layouts[name] = StateLayout(tuple(map(quantisation.layer, default.layers)))
        self.can_truncate = default.can_truncate
        self.has_positions = any(each.has_integers for each in default.positions)
        self.kv = {name: self._kv_layout(name, fingerprint) for name in self._layouts}

    def __getitem__(self, kv_type: KvType) -> StateLayout:
        return self._layouts[kv_type]

    def named(self, setting: KvType) -> KvType:
        """Return the KV type for a setting: one of ours, or a GGUF name such as "f16" for the
        default and "q8_0" for 8 bits. Raises ModelError."""
        if setting in self._layouts or setting.startswith("f"):
            return setting if setting in self._layouts else self.default
        bits = setting[:2]
        fitting = [name for name in self._layouts if name.startswith(bits)]
        preferred = f"{bits}_g64"  # the default of mlx_lm
        if not fitting:
            raise ModelError(
                f"this model does not support {preferred} KV cells: its heads are too narrow for "
                "groups of values, or its attention cannot read them; omit --fp8-kvcache and "
                "--kv-bits"
            )
        return preferred if preferred in fitting else fitting[-1]

    def make_caches(self, kv_type: KvType) -> list[Any]:
        caches: list[Any] = make_prompt_cache(self._model)
        if kv_type != self.default:
            caches = list(map(self._quantisations[kv_type].cache, caches))
        return caches

    def requantise(
        self, blob: Blob, tokens: int, source: KvType, target: KvType, *, resumable: bool = False
    ) -> bytes:
        """Convert a block to another type. Its checkpoint stays as it is. Raises CorruptBlock."""
        if self.kv[target].bits >= self.kv[source].bits:
            raise ValueError(f"{target} cells do not have fewer bits than {source} cells")
        reader = Reader(blob)
        parts: list[Part] = [block_header(tokens)]
        layout = self._layouts[source]
        parsed = layout.parse_positions(reader, tokens)
        for layer, arrays in zip(layout.positions, parsed, strict=True):
            if layer.has_integers:
                parts += arrays
                continue
            if source in self._quantisations:
                arrays = self._quantisations[source].floats(arrays)
            for array in arrays:
                parts += self._quantisations[target].quantised(array)
        checkpoint = bytes(reader.rest())
        if bool(checkpoint) != (resumable and not self.can_truncate):
            raise CorruptBlock("a block has an unexpected checkpoint, or lacks one")
        return joined([*parts, checkpoint])

    def _kv_layout(self, kv_type: KvType, fingerprint: bytes) -> KvLayout:
        layout = self._layouts[kv_type]
        quantisation = self._quantisations.get(kv_type)
        return KvLayout(
            bits=quantisation.bits if quantisation else _dtype(layout).size * 8,
            group_size=quantisation.group_size if quantisation else None,
            header_bytes=len(block_header(0)),
            token_bytes=layout.token_bytes,
            checkpoint_bytes=layout.checkpoint_bytes,
            fingerprint=blake3(fingerprint + repr(layout).encode()).digest(),
        )


def _measured(model: Any, caches: list[Any]) -> StateLayout:
    """Describe two steps, which are not computed: shapes and types suffice. Raises ModelError."""
    check_kinds(caches)
    model(mx.array([_PROBE[:1]]), cache=caches)
    earlier = share(caches, 1)
    model(mx.array([_PROBE]), cache=caches)
    return StateLayout.of(caches, earlier)


def _fitting(model: Any, default: StateLayout) -> Iterator[Quantisation]:
    """Yield the quantisations that all layers and the model's attention support."""
    layers = [layer for layer in default.positions if layer.rows and not layer.has_integers]
    fitting = [each for each in QUANTISATIONS if all(map(each.fits, layers))]
    if layers and fitting and _attends_to_quantised(model, fitting[0]):
        yield from fitting


def _attends_to_quantised(model: Any, quantisation: Quantisation) -> bool:
    """Return whether the code of the model accepts quantised keys. Attention with sinks, or with
    compressed keys, fails in various ways."""
    caches = [quantisation.cache(each) for each in make_prompt_cache(model)]
    try:
        model(mx.array([_PROBE]), cache=caches)
        model(mx.array([_PROBE[:1]]), cache=caches)
    except Exception:
        return False
    return True


def _dtype(layout: StateLayout) -> mx.Dtype:
    """Return the type of keys, or of the first array of a recurrent layer."""
    for layer in (*layout.positions, *layout.layers):
        if isinstance(layer, Recurrent):
            found = [slot.dtype for slot in layer.slots if slot and slot.dtype in _FLOAT_NAMES]
        else:
            found = [rows.dtype for rows in layer.rows]
        if found:
            return found[0]
    raise ModelError("this model keeps no state")
