"""A GGUF model in llama.cpp's memory: its weights, and what they say about themselves."""

from __future__ import annotations

import ctypes
from typing import Any

from rekindle.engine.base import EngineOptions, KvType, OnProgress
from rekindle.engine.llamacpp import bindings
from rekindle.engine.llamacpp.rope import choose_rope
from rekindle.engine.llamacpp.state import GROUPS
from rekindle.engine.llamacpp.tokenizer import LlamaTokenizer
from rekindle.errors import ModelError

ALL_LAYERS = 999


class LlamaModel:
    """Owns the native model; raises ModelError when there is none to be had from the file."""

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
            overrides = self.rope.overrides  # a name of its own keeps it alive while it loads
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
        """Layers that lie on a GPU, counted without regard to how many there are."""
        if not self.on_gpu:
            return 0
        return ALL_LAYERS if options.gpu_layers is None else options.gpu_layers

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
        """The type of most of its weights: the last word of llama.cpp's description."""
        return bindings.description(self.library, self.native).rsplit(" ", 1)[-1]

    @property
    def trained_tokens(self) -> int:
        """The longest context it was trained for."""
        return int(self.library.llama_model_n_ctx_train(self.native))

    @property
    def window_tokens(self) -> int:
        """Its sliding window; 0 where every layer sees everything."""
        return max(int(self.library.llama_model_n_swa(self.native)), 0)

    @property
    def is_causal(self) -> bool:
        """Whether a token sees those before it alone, without which no text can be generated."""
        return _value(self.library, self.native, "attention.causal") != "false"

    @property
    def pooling(self) -> int:
        """How its vectors are made of its tokens'; where the file does not say, as is usual."""
        usual = bindings.POOLING_LAST if self.is_causal else bindings.POOLING_MEAN
        return _number(self.library, self.native, "pooling_type") or usual

    @property
    def can_truncate(self) -> bool:
        """Recurrent state is of one position and cannot be taken apart."""
        recurrent = self.library.llama_model_is_recurrent(self.native)
        return not (recurrent or self.library.llama_model_is_hybrid(self.native))

    @property
    def kv_types(self) -> tuple[KvType, ...]:
        """The types that its KV cells can have: a quantised head is a whole number of groups."""
        widths = [_head_width(self.library, self.native, kind) for kind in ("key", "value")]
        if None in widths:
            return ()  # it has no cells
        return tuple(
            kv_type
            for kv_type, (group, _) in GROUPS.items()
            if not any(width and width % group for width in widths)
        )

    def close(self) -> None:
        self.library.llama_model_free(self.native)


def _check_kv_type(library: Any, model: int, kv_type: str) -> None:
    """A quantised head is a whole number of groups; llama.cpp would only say that it failed."""
    group, _ = GROUPS[kv_type]
    for kind in ("key", "value"):
        width = _head_width(library, model, kind)
        if width is not None and width % group:
            raise ModelError(
                f"this model cannot have {kv_type} KV cells: its {kind} heads are {width} wide, "
                f"which is no multiple of {group}; leave --kv-bits and --fp8-kvcache out"
            )


def _head_width(library: Any, model: int, kind: str) -> int | None:
    """As llama.cpp derives it from the model's metadata; None where there are no heads."""
    if width := _number(library, model, f"attention.{kind}_length"):
        return width
    heads = _number(library, model, "attention.head_count")
    return _number(library, model, "embedding_length") // heads if heads else None


def _number(library: Any, model: int, name: str) -> int:
    """A number of the architecture's own, 0 when the model does not say."""
    value = _value(library, model, name)
    return int(value) if value.isdecimal() else 0


def _value(library: Any, model: int, name: str) -> str:
    """A value of the architecture's own as text, empty when the model does not say."""
    architecture = bindings.metadata(library, model, "general.architecture")
    return bindings.metadata(library, model, f"{architecture}.{name}")
