"""State in files that mlx_lm reads with `load_prompt_cache` and writes with `save_prompt_cache`.

Such a file has the arrays and numbers of each layer's cache, and the names of their classes; it
does not say which tokens they are of. Ours say so in their metadata, with the state's fingerprint.
"""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    save_prompt_cache,
)

from rekindle.engine.base import Blob, KvType
from rekindle.engine.mlx.layers import Layer, Recurrent, buffers, leaves, set_buffers
from rekindle.engine.mlx.layouts import Layouts
from rekindle.engine.mlx.safetensors_file import SafetensorsFile
from rekindle.engine.mlx.state import truncate
from rekindle.errors import BadRequest

TOKENS, STATE = "rekindle_tokens", "rekindle_state"  # in the metadata
_SETTINGS = ("group_size", "bits", "keep", "max_size", "chunk_size")  # numbers of the model's own


class PromptCaches:
    """Files of a model's state of one KV type."""

    suffix = ".safetensors"

    def __init__(self, layouts: Layouts, kv_type: KvType) -> None:
        self._layouts = layouts
        self._kv_type = kv_type

    def writer(self) -> PromptCacheWriter:
        return PromptCacheWriter(self._layouts, self._kv_type)

    def read(self, path: Path) -> ReadState:
        """The state in a file; raises BadRequest."""
        file = SafetensorsFile(path)
        tokens = _tokens(file)
        fingerprint = self._layouts.kv[self._kv_type].fingerprint.hex()
        if file.metadata.get(f"0.{STATE}", fingerprint) != fingerprint:
            raise BadRequest(
                "This is state of another model, of other weights or adapters of it, or of another "
                "version of MLX: it can be of no use here.",
                param="file",
            )
        caches = self._layouts.make_caches(self._kv_type)
        layers = iter(self._layouts[self._kv_type].layers)
        for number, cache in enumerate(caches):
            name = file.metadata.get(f"1.{number}", "")
            _CacheReader(file, layers).read(cache, str(number), name)
        if f"1.{len(caches)}" in file.metadata:
            raise BadRequest(f"The file has more than the {len(caches)} layers of this model.")
        return ReadState(self._layouts, self._kv_type, caches, tokens)


class PromptCacheWriter:
    """Blocks become a file; nothing of it lies in the engine's pool."""

    def __init__(self, layouts: Layouts, kv_type: KvType) -> None:
        self._layouts = layouts
        self._kv_type = kv_type
        self._caches = layouts.make_caches(kv_type)
        self._length = 0

    def append(self, blob: Blob, tokens: int, *, resumable: bool = False) -> None:
        """Raises CorruptBlock."""
        start, self._length = self._length, self._length + tokens
        self._layouts[self._kv_type].restore_block(
            self._caches, blob, start, self._length, resumable=resumable
        )

    def save(self, path: Path, tokens: Seq[int]) -> None:
        """Write the state of these tokens: all that was appended, or less where it can be cut."""
        if len(tokens) < self._length:
            truncate(self._caches, len(tokens))
        known = {
            TOKENS: json.dumps(list(tokens)),
            STATE: self._layouts.kv[self._kv_type].fingerprint.hex(),
        }
        save_prompt_cache(str(path), [_compact(cache) for cache in self._caches], known)


def _compact(cache: Any) -> Any:
    """The cache without room to grow, of a class that mlx_lm knows."""
    if isinstance(cache, CacheList):
        return CacheList(*map(_compact, cache.caches))
    if isinstance(cache, KVCache | QuantizedKVCache):
        plain = KVCache()
        if isinstance(cache, QuantizedKVCache):
            plain = QuantizedKVCache(group_size=cache.group_size, bits=cache.bits)
        set_buffers(plain, [each[..., : cache.offset, :] for each in buffers(cache)])
        plain.offset = cache.offset
        return plain
    return cache


class ReadState:
    """State that was read from a file, in caches of its own."""

    def __init__(
        self, layouts: Layouts, kv_type: KvType, caches: list[Any], tokens: list[int]
    ) -> None:
        held = {cache.offset for cache in leaves(caches) if not isinstance(cache, ArraysCache)}
        held -= {0} if len(held) > 1 else set()  # of a cache that the model does not use
        if len(held) > 1:
            raise BadRequest("The layers of this file hold different numbers of tokens.")
        count = held.pop() if held else len(tokens)
        if len(tokens) != count:
            raise BadRequest(
                f"The file holds the state of {count} tokens and names {len(tokens)}.", param="file"
            )
        self.tokens = tokens
        self._layout = layouts[kv_type]
        self._caches = caches

    def export(self, start: int, stop: int, *, resumable: bool = False) -> bytes:
        """A block of it; `resumable` at its end alone."""
        return self._layout.export_block(self._caches, start, stop, resumable=resumable)


class _CacheReader:
    """Fills the caches of a model from a file, each as its layer must be."""

    def __init__(self, file: SafetensorsFile, layers: Any) -> None:
        self._file = file
        self._layers = layers
        scalars = (file.metadata.get(f"2.{n}.0") for n in range(1, len(file.metadata)))
        kinds = (file.metadata.get(f"2.{n}.1") for n in range(1, len(file.metadata)))
        self._none = {
            name for name, kind in zip(scalars, kinds, strict=True) if name and kind == "none"
        }

    def read(self, cache: Any, place: str, name: str) -> None:
        expected = type(_compact(cache)).__name__
        if name != expected:
            raise BadRequest(
                f"Layer {place} of the file is a {name or 'missing one'}, in this model it is a "
                f"{expected}. Files with quantised keys, or made with a limited cache size, are "
                "not taken.",
                param="file",
            )
        if isinstance(cache, CacheList):
            for number, part in enumerate(cache.caches):
                inner = f"{place}.{number}"
                self.read(part, f"{inner}.0", self._file.text(f"{inner}.1"))
            return
        layer: Layer = next(self._layers)
        if isinstance(layer, Recurrent):
            self._read_arrays(cache, layer, place)
        elif layer.rows:
            self._read_rows(cache, layer, place)

    def _read_arrays(self, cache: ArraysCache, layer: Recurrent, place: str) -> None:
        for number, slot in enumerate(layer.slots):
            name = f"{place}.0.{number}"
            if name in self._none:
                continue
            array = self._file.array(name)
            if slot is None or not slot.takes(array.shape) or array.dtype != slot.dtype:
                raise _misfit(place)
            cache.cache[number] = array

    def _read_rows(self, cache: Any, layer: Any, place: str) -> None:
        names = [f"{place}.0", f"{place}.1"]
        if isinstance(cache, QuantizedKVCache):
            names = [f"{name}.{part}" for name in names for part in range(3)]
        arrays = [self._file.array(name) for name in names]
        length = arrays[0].shape[2] if arrays[0].ndim == 4 else 0
        for rows, array in zip(layer.rows, arrays, strict=True):
            if array.shape != rows.shape(length) or array.dtype != rows.dtype:
                raise _misfit(place)
        set_buffers(cache, arrays)
        for number, name in enumerate(_numbers(cache), start=2):
            value = self._file.number(f"{place}.{number}")
            if name in _SETTINGS and value != getattr(cache, name):
                raise _misfit(place)
            setattr(cache, name, value)
        if not _is_sound(cache, length):
            raise _misfit(place)


def _numbers(cache: Any) -> tuple[str, ...]:
    """What `state` of a cache has behind its arrays."""
    match cache:
        case QuantizedKVCache():
            return "offset", "group_size", "bits"
        case RotatingKVCache():
            return "offset", "keep", "max_size", "_idx"
        case ChunkedKVCache():
            return "offset", "chunk_size", "start_position"
    return ("offset",)


def _is_sound(cache: Any, length: int) -> bool:
    """Whether the numbers of a cache agree with buffers of a length."""
    offset, most = cache.offset, getattr(cache, "max_size", length)
    if isinstance(cache, RotatingKVCache):
        is_in_order = cache._idx in (length, offset) and cache._idx <= length
        is_full = length == most and cache.keep < cache._idx < length
        return 0 < min(offset, most) <= length and bool(is_in_order or is_full)
    if isinstance(cache, ChunkedKVCache):
        held = offset - cache.start_position
        return bool(0 < min(offset, cache.chunk_size) <= held <= min(offset, length))
    return bool(0 < offset <= length)


def _tokens(file: SafetensorsFile) -> list[int]:
    try:
        found = json.loads(file.metadata.get(f"0.{TOKENS}", "null"))
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, list) or not found or not all(type(each) is int for each in found):
        raise BadRequest(
            "The file does not say which tokens its state is of, and reuse is decided by comparing "
            "tokens. Name them: `rekindle cache import FILE --tokens tokens.json`, or --prompt "
            "with the text that was given to mlx_lm.cache_prompt.",
            param="file",
        )
    return found


def _misfit(place: str) -> BadRequest:
    return BadRequest(
        f"Layer {place} of the file has another shape or type than this model's.", param="file"
    )
