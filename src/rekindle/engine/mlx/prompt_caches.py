"""Reads and writes files that mlx_lm exchanges with `load_prompt_cache` and `save_prompt_cache`.

Such a file has the arrays and numbers of the cache of each layer, and the names of their classes.
It does not say which tokens they belong to. Our files add the tokens and the fingerprint of the
state to the metadata.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
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
    Positions,
    Recurrent,
    Window,
    buffers,
    leaves,
    set_buffers,
)
from rekindle.engine.mlx.layouts import Layouts
from rekindle.engine.mlx.state import StateLayout, truncate
from rekindle.errors import BadRequest, NoMemory
from rekindle.models.safetensors import InvalidSafetensors, read_header

TOKENS, STATE = "rekindle_tokens", "rekindle_state"  # in the metadata
_MAX_ENTRIES = 64  # of the metadata per layer, or of a program; few have more than 12
_SETTINGS = ("group_size", "bits", "keep", "max_size", "chunk_size")  # fixed by the model


class PromptCaches:
    """Prompt cache files of one KV type of a model."""

    suffix = ".safetensors"

    def __init__(self, layouts: Layouts, kv_type: KvType, free_bytes: Callable[[], int]) -> None:
        self._layouts = layouts
        self._kv_type = kv_type
        self._free_bytes = free_bytes

    def writer(self) -> PromptCacheWriter:
        return PromptCacheWriter(self._layouts, self._kv_type)

    def read(self, path: Path) -> PromptCacheState:
        """Check a file and return its state, which is not read yet; raises BadRequest."""
        layout = self._layouts[self._kv_type]
        file = _ArrayFile(path, _MAX_ENTRIES * (1 + len(layout.layers)))
        tokens = _tokens(file)
        fingerprint = self._layouts.kv[self._kv_type].fingerprint.hex()
        if file.metadata.get(f"0.{STATE}", fingerprint) != fingerprint:
            raise BadRequest(
                "This state belongs to another model, to other weights or adapters, or to another "
                "version of MLX, so it cannot be used here.",
                param="file",
            )
        caches = self._layouts.make_caches(self._kv_type)
        return PromptCacheState(file, layout, caches, tokens, self._free_bytes)


class PromptCacheWriter:
    """Collects blocks in its own caches, outside the engine's pool, and writes them to a file."""

    def __init__(self, layouts: Layouts, kv_type: KvType) -> None:
        self._layouts = layouts
        self._kv_type = kv_type
        self._caches = layouts.make_caches(kv_type)
        self._length = 0

    def append(self, blob: Blob, tokens: int, *, resumable: bool = False) -> None:
        start, self._length = self._length, self._length + tokens
        self._layouts[self._kv_type].restore_block(
            self._caches, blob, start, self._length, resumable=resumable
        )

    def save(self, path: Path, tokens: Seq[int]) -> None:
        if len(tokens) < self._length:
            truncate(self._caches, len(tokens))
        known = {
            TOKENS: json.dumps(list(tokens)),
            STATE: self._layouts.kv[self._kv_type].fingerprint.hex(),
        }
        save_prompt_cache(str(path), [_compact(cache) for cache in self._caches], known)


def _compact(cache: Any) -> Any:
    """Return the cache without spare capacity, as a class that mlx_lm knows."""
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


class PromptCacheState:
    """The state in a file, checked against the layers of the model; raises BadRequest.

    Its arrays are read when the first block is exported, because the caller may refuse the tokens
    before.
    """

    def __init__(
        self,
        file: _ArrayFile,
        layout: StateLayout,
        caches: list[Any],
        tokens: list[int],
        free_bytes: Callable[[], int],
    ) -> None:
        self.tokens = tokens
        self._file = file
        self._layout = layout
        self._caches = caches
        self._free_bytes = free_bytes
        self._layers = iter(layout.layers)
        self._unread: list[tuple[Any, list[str | None]]] = []  # caches, and names of their arrays
        known = file.metadata
        self._none = {
            known.get(f"2.{n}.0") for n in range(1, len(known)) if known.get(f"2.{n}.1") == "none"
        }
        for number, cache in enumerate(caches):
            self._check(cache, str(number), known.get(f"1.{number}", ""))
        if f"1.{len(caches)}" in known:
            raise BadRequest(f"The file has more than the {len(caches)} layers of this model.")
        _check_count(caches, tokens)

    def export(self, start: int, stop: int, *, resumable: bool = False) -> bytes:
        self._read_arrays()
        return self._layout.export_block(self._caches, start, stop, resumable=resumable)

    def _read_arrays(self) -> None:
        """Fill the caches; raises NoMemory."""
        all_names = [name for _, names in self._unread for name in names if name]
        needed_bytes = sum(map(self._file.size_bytes, all_names))
        if needed_bytes and self._free_bytes() < needed_bytes:
            raise NoMemory.for_state_file(needed_bytes)
        for cache, names in self._unread:
            arrays: list[Any] = [self._file.array(name) if name else None for name in names]
            if isinstance(cache, ArraysCache):
                cache.cache = arrays
            else:
                set_buffers(cache, arrays)
        self._unread = []

    def _check(self, cache: Any, place: str, name: str) -> None:
        expected = type(_compact(cache)).__name__
        if name != expected:
            raise BadRequest(
                f"Layer {place} of the file is a {name or 'missing one'}, in this model it is a "
                f"{expected}. Files with quantised keys or with a limited cache size are not "
                "supported.",
                param="file",
            )
        if isinstance(cache, CacheList):
            for number, part in enumerate(cache.caches):
                inner = f"{place}.{number}"
                self._check(part, f"{inner}.0", self._file.text(f"{inner}.1"))
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
        self._unread.append((cache, names))

    def _check_rows(self, cache: Any, layer: Positions | Window | Chunk, place: str) -> None:
        names = [f"{place}.0", f"{place}.1"]
        if isinstance(cache, QuantizedKVCache):
            names = [f"{name}.{part}" for name in names for part in range(3)]
        shape = self._file.shape(names[0])
        length = shape[2] if len(shape) == 4 else 0
        if length > max(len(self.tokens) + STEP, getattr(layer, "most", 0)):
            raise _misfit(place)
        for rows, name in zip(layer.rows, names, strict=True):
            if self._file.shape(name) != rows.shape(length) or self._file.dtype(name) != rows.dtype:
                raise _misfit(place)
        self._unread.append((cache, [*names]))
        for number, name in enumerate(_numbers(cache), start=2):
            value = self._file.number(f"{place}.{number}")
            if name in _SETTINGS and value != getattr(cache, name):
                raise _misfit(place)
            setattr(cache, name, value)
        if not _is_sound(cache, length):
            raise _misfit(place)


def _check_count(caches: list[Any], tokens: list[int]) -> None:
    """Raise BadRequest unless the state has as many tokens as the file lists."""
    held = {cache.offset for cache in leaves(caches) if not isinstance(cache, ArraysCache)}
    held -= {0} if len(held) > 1 else set()  # a cache that the model does not use
    if len(held) > 1:
        raise BadRequest("The layers of this file hold different numbers of tokens.")
    count = held.pop() if held else len(tokens)
    if len(tokens) != count:
        raise BadRequest(
            f"The file holds the state of {count} tokens and names {len(tokens)}.", param="file"
        )


def _numbers(cache: Any) -> tuple[str, ...]:
    """Return the names of the numbers that follow the arrays in the `state` of a cache."""
    match cache:
        case QuantizedKVCache():
            return "offset", "group_size", "bits"
        case RotatingKVCache():
            return "offset", "keep", "max_size", "_idx"
        case ChunkedKVCache():
            return "offset", "chunk_size", "start_position"
    return ("offset",)


def _is_sound(cache: Any, length: int) -> bool:
    """Return whether the numbers of a cache agree with the length of its buffers."""
    offset, most = cache.offset, getattr(cache, "max_size", length)
    if isinstance(cache, RotatingKVCache):
        is_in_order = cache._idx in (length, offset) and cache._idx <= length
        is_full = length == most and cache.keep < cache._idx < length
        return 0 < min(offset, most) <= length and bool(is_in_order or is_full)
    if isinstance(cache, ChunkedKVCache):
        held = offset - cache.start_position
        return bool(0 < min(offset, cache.chunk_size) <= held <= min(offset, length))
    return bool(0 < offset <= length)


def _tokens(file: _ArrayFile) -> list[int]:
    try:
        found = json.loads(file.metadata.get(f"0.{TOKENS}", "null"))
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, list) or not found or not all(type(each) is int for each in found):
        raise BadRequest(
            "The file does not say which tokens its state belongs to, and reuse is decided by "
            "comparing tokens. Name them: `rekindle cache import FILE --tokens tokens.json`, or "
            "--prompt with the text that was given to mlx_lm.cache_prompt.",
            param="file",
        )
    return found


def _misfit(place: str) -> BadRequest:
    return BadRequest(
        f"Layer {place} of the file has another shape or type than this model's.", param="file"
    )


_DTYPES: dict[str, mx.Dtype] = {
    "BOOL": mx.bool_, "U8": mx.uint8, "I8": mx.int8, "U16": mx.uint16, "I16": mx.int16,
    "U32": mx.uint32, "I32": mx.int32, "U64": mx.uint64, "I64": mx.int64,
    "F16": mx.float16, "BF16": mx.bfloat16, "F32": mx.float32,
}  # fmt: skip


class _ArrayFile:
    """The arrays of an uploaded safetensors file; raises BadRequest if it is not one.

    The header is checked now. An array is read when it is asked for.
    """

    def __init__(self, path: Path, max_entries: int) -> None:
        """`max_entries` limits the arrays, and the entries of the metadata."""
        try:
            header = read_header(path, max_header_bytes=32 << 20)
        except InvalidSafetensors as error:
            raise _invalid(str(error)) from None
        self._path = path
        self._tensors = header.tensors
        self.metadata: dict[str, str] = header.metadata
        if not all(isinstance(value, str) for value in self.metadata.values()):
            raise _invalid("its metadata are not texts")
        if max(len(self.metadata), len(self._tensors)) > max_entries:
            raise _invalid("it has more arrays or metadata than state of this model")
        if any(tensor.dtype not in _DTYPES for tensor in self._tensors.values()):
            raise _invalid("it has an array of an unsupported type")

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._tensors:
            raise _invalid(f"{name} is missing")
        return self._tensors[name].shape

    def dtype(self, name: str) -> mx.Dtype:
        return _DTYPES[self._tensors[name].dtype]

    def size_bytes(self, name: str) -> int:
        return self._tensors[name].size_bytes

    def array(self, name: str) -> mx.array:
        shape, dtype, tensor = self.shape(name), self.dtype(name), self._tensors[name]
        if not tensor.size_bytes:
            return mx.zeros(shape, dtype)
        raw = np.memmap(self._path, np.uint8, "r", tensor.start, (tensor.size_bytes,))
        return mx.array(raw).view(dtype).reshape(shape)

    def number(self, name: str) -> int:
        """Read an integer that is stored as an array of one."""
        integers = (mx.int32, mx.int64, mx.uint32)
        if math.prod(self.shape(name)) != 1 or self.dtype(name) not in integers:
            raise _invalid(f"{name} is not an integer")
        found: Any = self.array(name).item()
        return int(found)

    def text(self, name: str) -> str:
        """Read a short text that is stored as an array of character codes."""
        shape = self.shape(name)
        if len(shape) != 1 or shape[0] > 64:
            raise _invalid(f"{name} is not a text")
        found: Any = self.array(name).tolist()
        return bytes(each for each in found if 0 <= each < 128).decode()


def _invalid(reason: str) -> BadRequest:
    return BadRequest(f"This is not a prompt cache in safetensors format: {reason}.", param="file")
