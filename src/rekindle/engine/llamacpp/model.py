"""Loads a GGUF model into llama.cpp and reads its metadata."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rekindle.engine.base import EngineOptions, KvType, OnProgress
from rekindle.engine.llamacpp import bindings
from rekindle.engine.llamacpp.state import GROUPS
from rekindle.engine.llamacpp.tokenizer import LlamaTokenizer
from rekindle.errors import ModelError
from rekindle.models.gguf_files import split_names


@dataclass(frozen=True, slots=True)
class TensorPlace:
    kind: int  # ggml's type
    offset_bytes: int
    size_bytes: int


class GgufHeader:
    """The header of a GGUF file, read before the model is loaded. It is empty if the file is
    unreadable."""

    def __init__(self, library: Any, native: int | None) -> None:
        self._library = library
        self._native = native

    def number(self, key: str) -> int:
        """Return an unsigned 32-bit value, or 0 if there is none."""
        index = self._find(key, bindings.GGUF_UINT32)
        return 0 if index is None else int(self._library.gguf_get_val_u32(self._native, index))

    def real(self, key: str) -> float:
        """Return a 32-bit float, or 0 if there is none."""
        index = self._find(key, bindings.GGUF_FLOAT32)
        return 0.0 if index is None else float(self._library.gguf_get_val_f32(self._native, index))

    def text(self, key: str) -> str:
        """Return a text, or an empty one if there is none."""
        index = self._find(key, bindings.GGUF_STRING)
        if index is None:
            return ""
        value: bytes = self._library.gguf_get_val_str(self._native, index)
        return value.decode(errors="replace")

    def has_tensor(self, name: str) -> bool:
        if not self._native:
            return False
        return bool(self._library.gguf_find_tensor(self._native, name.encode()) >= 0)

    def place(self, name: str) -> TensorPlace | None:
        """Return where a tensor is stored in the file, or None."""
        if not self.has_tensor(name):
            return None
        index = self._library.gguf_find_tensor(self._native, name.encode())
        start = self._library.gguf_get_data_offset(self._native)
        return TensorPlace(
            kind=int(self._library.gguf_get_tensor_type(self._native, index)),
            offset_bytes=start + self._library.gguf_get_tensor_offset(self._native, index),
            size_bytes=int(self._library.gguf_get_tensor_size(self._native, index)),
        )

    def _find(self, key: str, kind: int) -> int | None:
        """Return the index of a key. ggml ends the process if a value is read as another type."""
        if not self._native:
            return None
        index = int(self._library.gguf_find_key(self._native, key.encode()))
        if index < 0 or self._library.gguf_get_kv_type(self._native, index) != kind:
            return None
        return index


@contextmanager
def open_header(library: Any, path: Path) -> Iterator[GgufHeader]:
    native = library.gguf_init_from_file(str(path).encode(), bindings.GgufInitParams(True, None))
    try:
        yield GgufHeader(library, native)
    finally:
        if native:
            library.gguf_free(native)


@dataclass(frozen=True, slots=True)
class RopeChoice:
    """The rotation factors of a LongRoPE model, the same in every context.

    llama.cpp chooses between two sets by comparing the cells of each context with the original
    context length. A pool and an exact context have different numbers of cells, which also depend
    on free memory, so they could rotate differently. Here the settings and the model decide once.
    """

    key: str  # of the original context length in the metadata
    original_tokens: int
    factors: Literal["long", "short"]

    @property
    def overrides(self) -> Any:
        """Override the original context length by one that is below, or above, that of every
        context."""
        forced = 1 if self.factors == "long" else (1 << 31) - 1
        override = bindings.KvOverride(bindings.OVERRIDE_INT, self.key.encode())
        override.value.number = forced
        return (bindings.KvOverride * 2)(override, bindings.KvOverride())  # empty: the end


def choose_rope(library: Any, options: EngineOptions) -> RopeChoice | None:
    """Return None for a model with one set of factors, and for a file that llama.cpp cannot
    read."""
    files = [options.path.with_name(name) for name in split_names(options.path.name)]
    if not any(_has_long_factors(library, file) for file in files):
        return None
    with open_header(library, files[0]) as header:
        architecture = header.text("general.architecture")
        key = f"{architecture}.rope.scaling.original_context_length"
        trained_tokens = header.number(f"{architecture}.context_length")
        original_tokens = header.number(key) or trained_tokens
    wanted_tokens = options.context_tokens or trained_tokens
    factors: Literal["long", "short"] = "long" if wanted_tokens > original_tokens else "short"
    return RopeChoice(key, original_tokens, factors)


def _has_long_factors(library: Any, file: Path) -> bool:
    with open_header(library, file) as header:
        return header.has_tensor("rope_factors_long.weight")


class LlamaModel:
    """Owns the native model; raises ModelError if llama.cpp cannot load the file."""

    def __init__(self, options: EngineOptions, on_progress: OnProgress) -> None:
        self.library: Any = bindings.load_library()
        self.on_gpu = bool(self.library.llama_supports_gpu_offload())
        self.rope = choose_rope(self.library, options)
        self.native = self._load(options, on_progress)
        self.tokenizer = LlamaTokenizer(self.library, self.native)
        _check_kv_type(self.library, self.native, options.kv_type)

    def _load(self, options: EngineOptions, on_progress: OnProgress) -> int:
        params = self.library.llama_model_default_params()
        params.n_gpu_layers = self.gpu_layers(options)

        if self.rope:
            overrides = self.rope.overrides  # the name keeps it alive during the call
            params.kv_overrides = ctypes.cast(overrides, ctypes.c_void_p)

        def progress(done: float, _data: object) -> bool:
            on_progress(done)
            return True

        callback = bindings.ProgressCallback(progress)
        params.progress_callback = ctypes.cast(callback, ctypes.c_void_p)
        model = self.library.llama_model_load_from_file(str(options.path).encode(), params)
        if not model:
            raise ModelError(
                f"llama.cpp cannot load {options.path.name}: the file is damaged, or its "
                "architecture is newer than the pinned llama.cpp"
            )
        if self.library.llama_model_has_encoder(model):
            raise ModelError(f"{options.path.name} is not a text generation model")
        return int(model)

    def gpu_layers(self, options: EngineOptions) -> int:
        """Return the number of layers to put on the GPU. It may exceed the layers of the model."""
        if not self.on_gpu:
            return 0
        return 999 if options.gpu_layers is None else options.gpu_layers

    @property
    def layers(self) -> int:
        return int(self.library.llama_model_n_layer(self.native))

    @property
    def chat_template(self) -> str | None:
        source = self.library.llama_model_chat_template(self.native, None)
        return source.decode(errors="replace") if source else None

    @property
    def architecture(self) -> str:
        return bindings.metadata(self.library, self.native, "general.architecture")

    @property
    def parameters(self) -> int:
        return int(self.library.llama_model_n_params(self.native))

    @property
    def quantization(self) -> str:
        """The type of most weights: the last word of llama.cpp's description."""
        return bindings.description(self.library, self.native).rsplit(" ", 1)[-1]

    @property
    def trained_tokens(self) -> int:
        """The longest context that the model was trained for."""
        return int(self.library.llama_model_n_ctx_train(self.native))

    @property
    def window_tokens(self) -> int:
        """The sliding window, or 0 if every layer sees the whole context."""
        return max(int(self.library.llama_model_n_swa(self.native)), 0)

    @property
    def is_causal(self) -> bool:
        """Whether a token only sees earlier tokens. Other models cannot generate text."""
        return _value(self.library, self.native, "attention.causal") != "false"

    @property
    def pooling(self) -> int:
        """The pooling of embeddings. If the file does not say: the last token of a causal model,
        else the mean."""
        default = bindings.POOLING_LAST if self.is_causal else bindings.POOLING_MEAN
        return _number(self.library, self.native, "pooling_type") or default

    @property
    def can_truncate(self) -> bool:
        """Whether state can be cut anywhere. Recurrent state belongs to one position."""
        recurrent = self.library.llama_model_is_recurrent(self.native)
        return not (recurrent or self.library.llama_model_is_hybrid(self.native))

    @property
    def kv_types(self) -> tuple[KvType, ...]:
        """The KV types that the model supports. A quantised head has to be a multiple of a
        group."""
        widths = [_head_width(self.library, self.native, kind) for kind in ("key", "value")]
        if None in widths:
            return ()  # the model has no KV cells
        return tuple(
            kv_type
            for kv_type, (group, _) in GROUPS.items()
            if not any(width and width % group for width in widths)
        )

    def close(self) -> None:
        self.library.llama_model_free(self.native)


def _check_kv_type(library: Any, model: int, kv_type: str) -> None:
    """Refuse unsupported KV types here, because llama.cpp would only report a failure."""
    group, _ = GROUPS[kv_type]
    for kind in ("key", "value"):
        width = _head_width(library, model, kind)
        if width is not None and width % group:
            raise ModelError(
                f"this model does not support {kv_type} KV cells: the width of its {kind} heads, "
                f"{width}, is not a multiple of {group}; omit --kv-bits and --fp8-kvcache"
            )


def _head_width(library: Any, model: int, kind: str) -> int | None:
    """Derive the width of a head from the metadata as llama.cpp does, or None without heads."""
    if width := _number(library, model, f"attention.{kind}_length"):
        return width
    heads = _number(library, model, "attention.head_count")
    return _number(library, model, "embedding_length") // heads if heads else None


def _number(library: Any, model: int, name: str) -> int:
    """Return a number of the architecture, or 0 if the model has none."""
    value = _value(library, model, name)
    return int(value) if value.isdecimal() else 0


def _value(library: Any, model: int, name: str) -> str:
    """Return a value of the architecture as text, or an empty one if the model has none."""
    architecture = bindings.metadata(library, model, "general.architecture")
    return bindings.metadata(library, model, f"{architecture}.{name}")
