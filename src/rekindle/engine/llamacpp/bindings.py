"""Declares llama.cpp's C interface, and checks that it fits the loaded library.

Layouts follow `llama.h` of xllamacpp 2026.10.11549 and change between versions. A library whose
default parameters do not read back with the values of that version is refused.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    Union,
    c_bool,
    c_char,
    c_char_p,
    c_double,
    c_float,
    c_int,
    c_int8,
    c_int32,
    c_int64,
    c_size_t,
    c_uint8,
    c_uint32,
    c_uint64,
    c_void_p,
)
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from rekindle.errors import LibraryMismatch
from rekindle.protocol.settings import LIBRARY_VARIABLE

SOURCES = "xllamacpp==2026.10.11549"  # the package with the library and its sources
MAX_SEQUENCES = 256  # LLAMA_MAX_SEQ

FLASH_ATTENTION_ENABLED = 1
DECODE_OK, DECODE_NO_ROOM = 0, 1
#: llama_token_attr
TOKEN_UNKNOWN, TOKEN_CONTROL, TOKEN_USER_DEFINED = 1 << 0, 1 << 3, 1 << 4
TOKEN_STRIPS_BEFORE, TOKEN_STRIPS_AFTER = 1 << 7, 1 << 8
#: LLAMA_STATE_SEQ_FLAGS: all, only recurrent state, all with the cells kept on the device
WHOLE_STATE, PARTIAL_STATE, STATE_ON_DEVICE = 0, 1, 2
STATE_HEADER_BYTES = 8  # magic and sequence id, before the state of a sequence
OVERRIDE_INT = 0  # LLAMA_KV_OVERRIDE_TYPE_INT
GGUF_UINT32, GGUF_FLOAT32, GGUF_STRING = 4, 6, 8  # gguf_type
POOLING_MEAN, POOLING_CLS, POOLING_LAST, POOLING_RANK = 1, 2, 3, 4  # LLAMA_POOLING_TYPE
DEVICE_CPU, DEVICE_GPU, DEVICE_INTEGRATED_GPU = 0, 1, 2  # GGML_BACKEND_DEVICE_TYPE

GGML_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 8, "bf16": 30}


class ModelParams(Structure):
    _fields_: ClassVar = [
        ("devices", c_void_p), ("tensor_buft_overrides", c_void_p), ("n_gpu_layers", c_int32),
        ("split_mode", c_int), ("load_mode", c_int), ("lazy_mode", c_int), ("main_gpu", c_int32),
        ("tensor_split", c_void_p), ("progress_callback", c_void_p),
        ("progress_callback_user_data", c_void_p), ("kv_overrides", c_void_p),
        ("vocab_only", c_bool), ("check_tensors", c_bool), ("use_extra_bufts", c_bool),
        ("no_host", c_bool), ("no_alloc", c_bool), ("load_mtp", c_bool),
    ]  # fmt: skip


class ContextParams(Structure):
    _fields_: ClassVar = [
        ("n_ctx", c_uint32), ("n_batch", c_uint32), ("n_ubatch", c_uint32),
        ("n_seq_max", c_uint32), ("n_rs_seq", c_uint32), ("n_outputs_max", c_uint32),
        ("n_outputs_max_per_seq", c_uint32), ("n_threads", c_int32), ("n_threads_batch", c_int32),
        ("ctx_type", c_int), ("rope_scaling_type", c_int), ("pooling_type", c_int),
        ("attention_type", c_int), ("flash_attn_type", c_int), ("rope_freq_base", c_float),
        ("rope_freq_scale", c_float), ("yarn_ext_factor", c_float), ("yarn_attn_factor", c_float),
        ("yarn_beta_fast", c_float), ("yarn_beta_slow", c_float), ("yarn_orig_ctx", c_uint32),
        ("defrag_thold", c_float), ("cb_eval", c_void_p), ("cb_eval_user_data", c_void_p),
        ("type_k", c_int), ("type_v", c_int), ("moe_cache_size", c_size_t),
        ("abort_callback", c_void_p), ("abort_callback_data", c_void_p), ("embeddings", c_bool),
        ("offload_kqv", c_bool), ("no_perf", c_bool), ("op_offload", c_bool), ("swa_full", c_bool),
        ("kv_unified", c_bool), ("samplers", c_void_p), ("n_samplers", c_size_t),
        ("ctx_other", c_void_p),
    ]  # fmt: skip


class LlamaBatch(Structure):
    _fields_: ClassVar = [
        ("n_tokens", c_int32), ("token", POINTER(c_int32)), ("embd", POINTER(c_float)),
        ("pos", POINTER(c_int32)), ("n_seq_id", POINTER(c_int32)),
        ("seq_id", POINTER(POINTER(c_int32))), ("logits", POINTER(c_int8)),
    ]  # fmt: skip


class _OverrideValue(Union):
    _fields_: ClassVar = [("number", c_int64), ("real", c_double), ("text", c_char * 128)]


class KvOverride(Structure):
    _fields_: ClassVar = [("tag", c_int), ("key", c_char * 128), ("value", _OverrideValue)]


class GgufInitParams(Structure):
    _fields_: ClassVar = [("no_alloc", c_bool), ("ctx", c_void_p)]


LogCallback = CFUNCTYPE(None, c_int, c_char_p, c_void_p)
ProgressCallback = CFUNCTYPE(c_bool, c_float, c_void_p)

_P = c_void_p  # llama.cpp objects are opaque pointers
_STATE_ARGUMENTS = [_P, POINTER(c_uint8), c_size_t, c_int32, c_uint32]

_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "llama_print_system_info": (c_char_p, []),
    "llama_backend_init": (None, []),
    "llama_log_set": (None, [LogCallback, _P]),
    "llama_supports_gpu_offload": (c_bool, []),
    "llama_max_devices": (c_size_t, []),
    "llama_model_default_params": (ModelParams, []),
    "llama_context_default_params": (ContextParams, []),
    "llama_model_load_from_file": (_P, [c_char_p, ModelParams]),
    "llama_model_free": (None, [_P]),
    "llama_model_get_vocab": (_P, [_P]),
    "llama_model_n_ctx_train": (c_int32, [_P]),
    "llama_model_n_embd_inp": (c_int32, [_P]),
    "llama_model_n_embd_out": (c_int32, [_P]),
    "llama_model_n_cls_out": (c_uint32, [_P]),
    "llama_model_cls_label": (c_char_p, [_P, c_uint32]),
    "llama_model_n_layer": (c_int32, [_P]),
    "llama_model_n_swa": (c_int32, [_P]),
    "llama_model_is_recurrent": (c_bool, [_P]),
    "llama_model_is_hybrid": (c_bool, [_P]),
    "llama_model_has_encoder": (c_bool, [_P]),
    "llama_model_desc": (c_int32, [_P, c_char_p, c_size_t]),
    "llama_model_n_params": (c_uint64, [_P]),
    "llama_model_chat_template": (c_char_p, [_P, c_char_p]),
    "llama_model_meta_val_str": (c_int32, [_P, c_char_p, c_char_p, c_size_t]),
    "llama_init_from_model": (_P, [_P, ContextParams]),
    "llama_free": (None, [_P]),
    "llama_adapter_lora_init": (_P, [_P, c_char_p]),
    "llama_set_adapters_lora": (c_int32, [_P, POINTER(_P), c_size_t, POINTER(c_float)]),
    "llama_get_memory": (_P, [_P]),
    "llama_memory_clear": (None, [_P, c_bool]),
    "llama_memory_seq_rm": (c_bool, [_P, c_int32, c_int32, c_int32]),
    "llama_memory_seq_cp": (None, [_P, c_int32, c_int32, c_int32, c_int32]),
    "llama_memory_seq_pos_min": (c_int32, [_P, c_int32]),
    "llama_memory_seq_pos_max": (c_int32, [_P, c_int32]),
    "llama_state_seq_get_size_ext": (c_size_t, [_P, c_int32, c_uint32]),
    "llama_state_seq_get_data_ext": (c_size_t, _STATE_ARGUMENTS),
    "llama_state_seq_set_data_ext": (c_size_t, _STATE_ARGUMENTS),
    "llama_decode": (c_int32, [_P, LlamaBatch]),
    "llama_set_causal_attn": (None, [_P, c_bool]),
    "llama_set_n_threads": (None, [_P, c_int32, c_int32]),
    "llama_encode": (c_int32, [_P, LlamaBatch]),
    "llama_get_embeddings_seq": (POINTER(c_float), [_P, c_int32]),
    "llama_get_logits_ith": (_P, [_P, c_int32]),
    "llama_vocab_n_tokens": (c_int32, [_P]),
    "llama_vocab_type": (c_int, [_P]),
    "llama_vocab_get_text": (c_char_p, [_P, c_int32]),
    "llama_vocab_get_attr": (c_int, [_P, c_int32]),
    "llama_vocab_is_eog": (c_bool, [_P, c_int32]),
    "llama_vocab_bos": (c_int32, [_P]),
    "llama_vocab_eos": (c_int32, [_P]),
    "llama_vocab_sep": (c_int32, [_P]),
    "llama_vocab_fim_pre": (c_int32, [_P]),
    "llama_vocab_fim_suf": (c_int32, [_P]),
    "llama_vocab_fim_mid": (c_int32, [_P]),
    "llama_vocab_fim_rep": (c_int32, [_P]),
    "llama_vocab_fim_sep": (c_int32, [_P]),
    "llama_vocab_get_add_bos": (c_bool, [_P]),
    "llama_vocab_get_add_eos": (c_bool, [_P]),
    "llama_vocab_get_add_sep": (c_bool, [_P]),
    "llama_tokenize": (c_int32, [_P, c_char_p, c_int32, POINTER(c_int32), c_int32, c_bool, c_bool]),
    "llama_token_to_piece": (c_int32, [_P, c_int32, c_char_p, c_int32, c_int32, c_bool]),
    "ggml_quantize_chunk": (c_size_t, [c_int, _P, _P, c_int64, c_int64, c_int64, _P]),
    "gguf_init_from_file": (_P, [c_char_p, GgufInitParams]),
    "gguf_free": (None, [_P]),
    "gguf_find_key": (c_int64, [_P, c_char_p]),
    "gguf_find_tensor": (c_int64, [_P, c_char_p]),
    "gguf_get_data_offset": (c_size_t, [_P]),
    "gguf_get_tensor_offset": (c_size_t, [_P, c_int64]),
    "gguf_get_tensor_size": (c_size_t, [_P, c_int64]),
    "gguf_get_tensor_type": (c_int, [_P, c_int64]),
    "gguf_get_kv_type": (c_int, [_P, c_int64]),
    "gguf_get_val_u32": (c_uint32, [_P, c_int64]),
    "gguf_get_val_f32": (c_float, [_P, c_int64]),
    "gguf_get_val_str": (c_char_p, [_P, c_int64]),
    "ggml_backend_dev_host_buffer_type": (_P, [_P]),
    "ggml_backend_buft_alloc_buffer": (_P, [_P, c_size_t]),
    "ggml_backend_buffer_get_base": (_P, [_P]),
    "ggml_backend_buffer_get_type": (_P, [_P]),
    "ggml_backend_buffer_free": (None, [_P]),
    "ggml_backend_dev_count": (c_size_t, []),
    "ggml_backend_dev_get": (_P, [c_size_t]),
    "ggml_backend_dev_name": (c_char_p, [_P]),
    "ggml_backend_dev_description": (c_char_p, [_P]),
    "ggml_backend_dev_type": (c_int, [_P]),
    "ggml_backend_dev_memory": (None, [_P, POINTER(c_size_t), POINTER(c_size_t)]),
}

# Default parameters of the supported version.
_KNOWN_CONTEXT = {
    "n_ctx": 512, "n_batch": 2048, "n_ubatch": 512, "n_seq_max": 1, "n_threads": 4,
    "n_threads_batch": 4, "rope_scaling_type": -1, "pooling_type": -1, "attention_type": -1,
    "flash_attn_type": -1, "yarn_ext_factor": -1.0, "yarn_beta_fast": -1.0, "defrag_thold": -1.0,
    "type_k": GGML_TYPES["f16"], "type_v": GGML_TYPES["f16"], "moe_cache_size": 0,
    "embeddings": False, "offload_kqv": True, "no_perf": True, "op_offload": True,
    "swa_full": True, "kv_unified": False, "n_samplers": 0, "ctx_other": None,
}  # fmt: skip
_KNOWN_MODEL = {
    "n_gpu_layers": -1, "split_mode": 1, "main_gpu": 0, "vocab_only": False,
    "check_tensors": False, "use_extra_bufts": True, "no_host": False,
}  # fmt: skip


def library_path() -> Path:
    """Return the library to load: `REKINDLE_LLAMA_LIB`, or the one inside the xllamacpp package."""
    if chosen := os.environ.get(LIBRARY_VARIABLE):
        return Path(chosen)
    spec = importlib.util.find_spec("xllamacpp")  # located without importing it
    if spec is None or spec.origin is None:
        raise LibraryMismatch("the xllamacpp package is not installed; run `make install`")
    found = sorted(Path(spec.origin).parent.glob("xllamacpp*.so"))
    if not found:
        raise LibraryMismatch("the xllamacpp package contains no shared library for this system")
    return found[0]


@cache
def load_library() -> Any:
    path = library_path()
    # OpenMP threads spin this long at a barrier before they sleep. It covers the pause between two
    # steps: sleeping there costs a tenth of decode speed. The default is three times as long, which
    # slows prefill by 40 % when another program wants a core. libgomp reads it while it is loaded.
    os.environ.setdefault("GOMP_SPINCOUNT", "100000")
    if sys.platform == "linux":
        # A CUDA build has copies of libstdc++ symbols. Those of the system must come first.
        ctypes.CDLL("libstdc++.so.6", ctypes.RTLD_GLOBAL)
    try:
        library = _checked(path)
    except LibraryMismatch as error:
        if LIBRARY_VARIABLE not in os.environ:
            raise
        remedy = f"run `rekindle build-gpu` again, or unset llama_lib and {LIBRARY_VARIABLE}"
        raise LibraryMismatch(f"{error}. It is {path}: {remedy}") from None
    _silence(library)
    library.llama_backend_init()
    return library


def _checked(path: Path) -> Any:
    """Load the library if it is of the version that this module is for."""
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise LibraryMismatch(f"cannot load the llama.cpp library: {error}") from None
    declare(library, _SIGNATURES)
    check_layout("context", library.llama_context_default_params(), _KNOWN_CONTEXT)
    check_layout("model", library.llama_model_default_params(), _KNOWN_MODEL)
    return library


def declare(library: Any, signatures: dict[str, tuple[Any, list[Any]]]) -> None:
    """Tell ctypes the results and arguments of functions; raises LibraryMismatch."""
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name, None)
        if function is None:
            raise LibraryMismatch(f"the llama.cpp library lacks `{name}`; use the pinned version")
        function.restype, function.argtypes = result, arguments


def metadata(library: Any, model: int, name: str) -> str:
    text = ctypes.create_string_buffer(128)
    length = library.llama_model_meta_val_str(model, name.encode(), text, len(text))
    return text.value.decode(errors="replace") if length >= 0 else ""


def description(library: Any, model: int) -> str:
    """Return architecture, size and weight type in the words of llama.cpp."""
    text = ctypes.create_string_buffer(128)
    library.llama_model_desc(model, text, len(text))
    return text.value.decode(errors="replace")


def check_layout(what: str, defaults: Structure, known: dict[str, Any]) -> None:
    wrong = {
        name: read for name, value in known.items() if (read := getattr(defaults, name)) != value
    }
    if wrong:
        raise LibraryMismatch(
            f"the llama.cpp library's default {what} parameters read back wrong ({wrong}): "
            "its structure layout is not that of the pinned version"
        )


def _silence(library: Any) -> None:
    """Print only the errors among llama.cpp's log lines."""

    def on_log(level: int, text: bytes, _data: object) -> None:
        if level == 4:  # GGML_LOG_LEVEL_ERROR
            sys.stderr.write(f"llama.cpp: {text.decode(errors='replace')}")

    library._on_log = LogCallback(on_log)  # keeps the callback alive
    library.llama_log_set(library._on_log, None)
