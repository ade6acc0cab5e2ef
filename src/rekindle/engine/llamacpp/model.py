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
from rekindle.engine.llamacpp.gpus import distribute
from rekindle.engine.llamacpp.state import GROUPS
from rekindle.engine.llamacpp.tokenizer import LlamaTokenizer
from rekindle.errors import ModelError
from rekindle.models.gguf_files import split_names


@dataclass(frozen=True, slots=True)
class TensorPlace:
    kind: int  # ggml's type
    offset_bytes: int
    size_bytes: int


_GGUF_READERS = {
    bindings.GGUF_UINT32: "gguf_get_val_u32",
    bindings.GGUF_FLOAT32: "gguf_get_val_f32",
    bindings.GGUF_STRING: "gguf_get_val_str",
}


class GgufHeader:
    """The header of a GGUF file that is not loaded yet. Empty if the file is unreadable."""

    def __init__(self, library: Any, native: int | None) -> None:
        self._library = library
        self._native = native

    def number(self, key: str) -> int:
        return int(self._value(key, bindings.GGUF_UINT32) or 0)

    def real(self, key: str) -> float:
        return float(self._value(key, bindings.GGUF_FLOAT32) or 0)

    def text(self, key: str) -> str:
        value: bytes = self._value(key, bindings.GGUF_STRING) or b""
        return value.decode(errors="replace")

    def _value(self, key: str, kind: int) -> Any:
        """Return None if absent. ggml ends the process if a value is read as another type."""
        if not self._native:
            return None
        index = self._library.gguf_find_key(self._native, key.encode())
        if index < 0 or self._library.gguf_get_kv_type(self._native, index) != kind:
            return None
        return getattr(self._library, _GGUF_READERS[kind])(self._native, index)

    def place(self, name: str) -> TensorPlace | None:
        index = self._library.gguf_find_tensor(self._native, name.encode()) if self._native else -1
        if index < 0:
            return None
        start = self._library.gguf_get_data_offset(self._native)
        return TensorPlace(
            kind=int(self._library.gguf_get_tensor_type(self._native, index)),
            offset_bytes=start + self._library.gguf_get_tensor_offset(self._native, index),
            size_bytes=int(self._library.gguf_get_tensor_size(self._native, index)),
        )


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
        """Force the factors by an original length that is below, or above, every context."""
        forced = 1 if self.factors == "long" else (1 << 31) - 1
        override = bindings.KvOverride(bindings.OVERRIDE_INT, self.key.encode())
        override.value.number = forced
        return (bindings.KvOverride * 2)(override, bindings.KvOverride())  # empty: the end


def choose_rope(library: Any, options: EngineOptions) -> RopeChoice | None:
    """Choose the factors by the context length. None for a model with one set of factors, and
    for an unreadable file."""
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
        return header.place("rope_factors_long.weight") is not None


class LlamaModel:
    """Owns the native model and its metadata; raises ModelError if llama.cpp cannot load it."""

    def __init__(self, options: EngineOptions, on_progress: OnProgress) -> None:
        library = self.library = bindings.load_library()
        self.on_gpu = bool(library.llama_supports_gpu_offload())
        self.distribution = distribute(library, options)
        self.rope = choose_rope(library, options)
        native = self.native = self._load(options, on_progress)
        self.tokenizer = LlamaTokenizer(library, native)
        self.architecture = bindings.metadata(library, native, "general.architecture")
        self.layers = int(library.llama_model_n_layer(native))
        self.parameters = int(library.llama_model_n_params(native))
        #: The type of most weights: the last word of llama.cpp's description.
        self.quantization = bindings.description(library, native).rsplit(" ", 1)[-1]
        template = library.llama_model_chat_template(native, None)
        self.chat_template: str | None = template.decode(errors="replace") if template else None
        template = library.llama_model_chat_template(native, b"rerank")
        self.rerank_prompt: str | None = template.decode(errors="replace") if template else None
        #: The names of the outputs of a classifier, if the file has them.
        self.labels = [
            (library.llama_model_cls_label(native, place) or b"").decode(errors="replace")
            for place in range(int(library.llama_model_n_cls_out(native)))
        ]
        self.trained_tokens = int(library.llama_model_n_ctx_train(native))
        #: The sliding window, or 0 if every layer sees the whole context.
        self.window_tokens = max(int(library.llama_model_n_swa(native)), 0)
        #: Whether a token only sees earlier tokens. Other models cannot generate text.
        self.is_causal = self._value("attention.causal") != "false"
        default_pooling = bindings.POOLING_LAST if self.is_causal else bindings.POOLING_MEAN
        self.pooling = self._number("pooling_type") or default_pooling
        #: Recurrent state belongs to one position and cannot be cut.
        self.can_truncate = not (
            library.llama_model_is_recurrent(native) or library.llama_model_is_hybrid(native)
        )
        self._check_kv_type(options.kv_type)
        #: A native LoRA adapter, which every context applies. It is freed with the model.
        self.adapter = self._load_adapter(options.adapter)

    def _load(self, options: EngineOptions, on_progress: OnProgress) -> int:
        params = self.library.llama_model_default_params()
        params.n_gpu_layers = self.gpu_layers(options)
        self.distribution.apply(params)
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

    def _load_adapter(self, path: Path | None) -> int:
        if path is None:
            return 0
        adapter = self.library.llama_adapter_lora_init(self.native, str(path).encode())
        if not adapter:
            raise ModelError(
                f"llama.cpp cannot load the adapter {path.name}: it is damaged, or it was made for "
                "another model. Give a LoRA adapter in GGUF that was made for this model."
            )
        return int(adapter)

    def gpu_layers(self, options: EngineOptions) -> int:
        """Return the number of layers to put on the GPU. It may exceed the layers of the model."""
        if not self.on_gpu:
            return 0
        return 999 if options.gpu_layers is None else options.gpu_layers

    @property
    def kv_types(self) -> tuple[KvType, ...]:
        """The supported KV types. The width of a quantised head has to be a multiple of a group."""
        widths = [self._head_width(kind) for kind in ("key", "value")]
        if None in widths:
            return ()  # the model has no KV cells
        return tuple(
            kv_type
            for kv_type, (group, _) in GROUPS.items()
            if not any(width and width % group for width in widths)
        )

    def _check_kv_type(self, kv_type: str) -> None:
        """Refuse unsupported KV types here, because llama.cpp would only report a failure."""
        group, _ = GROUPS[kv_type]
        for kind in ("key", "value"):
            width = self._head_width(kind)
            if width is not None and width % group:
                raise ModelError(
                    f"this model does not support {kv_type} KV cells: the width of its {kind} "
                    f"heads, {width}, is not a multiple of {group}; omit --kv-bits and "
                    "--fp8-kvcache"
                )

    def _head_width(self, kind: str) -> int | None:
        """Derive the width of a head as llama.cpp does. None without heads."""
        if width := self._number(f"attention.{kind}_length"):
            return width
        heads = self._number("attention.head_count")
        return self._number("embedding_length") // heads if heads else None

    def _number(self, name: str) -> int:
        value = self._value(name)
        return int(value) if value.isdecimal() else 0

    def _value(self, name: str) -> str:
        """Return a value of the architecture, or an empty text."""
        return bindings.metadata(self.library, self.native, f"{self.architecture}.{name}")

    def close(self) -> None:
        self.library.llama_model_free(self.native)
