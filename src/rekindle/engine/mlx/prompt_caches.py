"""State in files that mlx_lm reads with `load_prompt_cache` and writes with `save_prompt_cache`.

Such a file has the arrays and numbers of each layer's cache, and the names of their classes; it
does not say which tokens they are of. Ours say so in their metadata, with the state's fingerprint.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial
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
from rekindle.engine.mlx.layers import (
    STEP,
    Chunk,
    Layer,
    Positions,
    Recurrent,
    Window,
    buffers,
    leaves,
    set_buffers,
)
from rekindle.engine.mlx.layouts import Layouts
from rekindle.engine.mlx.safetensors_file import SafetensorsFile
from rekindle.engine.mlx.state import StateLayout, truncate
from rekindle.errors import BadRequest, NoMemory

TOKENS, STATE = "rekindle_tokens", "rekindle_state"  # in the metadata
_MOST_ENTRIES = 64  # of the metadata for each layer, or of a program's own; few have more than 12
_SETTINGS = ("group_size", "bits", "keep", "max_size", "chunk_size")  # numbers of the model's own


class PromptCaches:
    """Files of a model's state of one KV type."""

    suffix = ".safetensors"

    def __init__(self, layouts: Layouts, kv_type: KvType, free_bytes: Callable[[], int]) -> None:
        self._layouts = layouts
        self._kv_type = kv_type
        self._free_bytes = free_bytes

    def writer(self) -> PromptCacheWriter:
        return PromptCacheWriter(self._layouts, self._kv_type)

    def read(self, path: Path) -> ReadState:
        """The state in a file, which is checked and not yet read; raises BadRequest."""
        layout = self._layouts[self._kv_type]
        file = SafetensorsFile(path, _MOST_ENTRIES * (1 + len(layout.layers)))
        tokens = _tokens(file)
        fingerprint = self._layouts.kv[self._kv_type].fingerprint.hex()
        if file.metadata.get(f"0.{STATE}", fingerprint) != fingerprint:
            raise BadRequest(
                "This is state of another model, of other weights or adapters of it, or of another "
                "version of MLX: it can be of no use here.",
                param="file",
            )
        caches = self._layouts.make_caches(self._kv_type)
        reader = _CacheReader(file, layout.layers, len(tokens))
        for number, cache in enumerate(caches):
            reader.check(cache, str(number), file.metadata.get(f"1.{number}", ""))
        if f"1.{len(caches)}" in file.metadata:
            raise BadRequest(f"The file has more than the {len(caches)} layers of this model.")
        _check_count(caches, tokens)
        return ReadState(layout, caches, tokens, partial(reader.fill, self._free_bytes))


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
    """State in a file. Its arrays are read, into caches of its own, when the first block is asked
    for: whoever asks may refuse the tokens before."""

    def __init__(
        self,
        layout: StateLayout,
        caches: list[Any],
        tokens: list[int],
        fill: Callable[[], None],
    ) -> None:
        self.tokens = tokens
        self._layout = layout
        self._caches = caches
        self._fill: Callable[[], None] | None = fill

    def export(self, start: int, stop: int, *, resumable: bool = False) -> bytes:
        """A block of it; `resumable` at its end alone. Raises NoMemory."""
        if self._fill is not None:
            self._fill()
            self._fill = None
        return self._layout.export_block(self._caches, start, stop, resumable=resumable)


def _check_count(caches: list[Any], tokens: list[int]) -> None:
    """Refuse state of another number of tokens than are named."""
    held = {cache.offset for cache in leaves(caches) if not isinstance(cache, ArraysCache)}
    held -= {0} if len(held) > 1 else set()  # of a cache that the model does not use
    if len(held) > 1:
        raise BadRequest("The layers of this file hold different numbers of tokens.")
    count = held.pop() if held else len(tokens)
    if len(tokens) != count:
        raise BadRequest(
            f"The file holds the state of {count} tokens and names {len(tokens)}.", param="file"
        )


class _CacheReader:
    """Fills the caches of a model from a file, each as its layer must be."""

    def __init__(self, file: SafetensorsFile, layers: Seq[Layer], tokens: int) -> None:
        self._file = file
        self._layers = iter(layers)
        self._tokens = tokens
        self._checked: list[tuple[Any, list[str | None]]] = []  # caches and names of their arrays
        known = file.metadata
        self._none = {
            known.get(f"2.{n}.0") for n in range(1, len(known)) if known.get(f"2.{n}.1") == "none"
        }

    def fill(self, free_bytes: Callable[[], int]) -> None:
        """Read the arrays of the caches that were checked; raises NoMemory."""
        all_names = [name for _, names in self._checked for name in names if name]
        needed_bytes = sum(map(self._file.size_bytes, all_names))
        if free_bytes() < needed_bytes:
            raise NoMemory.for_state_file(needed_bytes)
        for cache, names in self._checked:
            arrays: list[Any] = [self._file.array(name) if name else None for name in names]
            if isinstance(cache, ArraysCache):
                cache.cache = arrays
            else:
                set_buffers(cache, arrays)

    def check(self, cache: Any, place: str, name: str) -> None:
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
                self.check(part, f"{inner}.0", self._file.text(f"{inner}.1"))
            return
        layer = next(self._layers)
        if isinstance(layer, Recurrent):
            self._check_arrays(cache, layer, place)
        elif layer.rows:
            self._check_rows(cache, layer, place)

    def _check_arrays(self, cache: ArraysCache, layer: Recurrent, place: str) -> None:
        names: list[str | None] = []
        for number, slot in enumerate(layer.slots):
            name = f"{place}.0.{number}"
            if name in self._none:
                names.append(None)
                continue
            if slot is None or not slot.takes(self._file.shape(name)):
                raise _misfit(place)
            if self._file.dtype(name) != slot.dtype:
                raise _misfit(place)
            names.append(name)
        self._checked.append((cache, names))

    def _check_rows(self, cache: Any, layer: Positions | Window | Chunk, place: str) -> None:
        names = [f"{place}.0", f"{place}.1"]
        if isinstance(cache, QuantizedKVCache):
            names = [f"{name}.{part}" for name in names for part in range(3)]
        shape = self._file.shape(names[0])
        length = shape[2] if len(shape) == 4 else 0
        if length > max(self._tokens + STEP, getattr(layer, "most", 0)):
            raise _misfit(place)
        for rows, name in zip(layer.rows, names, strict=True):
            if self._file.shape(name) != rows.shape(length) or self._file.dtype(name) != rows.dtype:
                raise _misfit(place)
        self._checked.append((cache, [*names]))
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
