"""The C interface of mtmd, llama.cpp's library for pictures: layouts, signatures, and their check.

It is part of the same shared library; layouts follow its `mtmd.h`. See bindings.py.
"""

from __future__ import annotations

from ctypes import (
    POINTER,
    Structure,
    c_bool,
    c_char_p,
    c_float,
    c_int,
    c_int32,
    c_size_t,
    c_uint8,
    c_uint32,
    c_void_p,
)
from functools import cache
from typing import Any, ClassVar

from rekindle.engine.llamacpp.bindings import check_layout, declare, load_library

CHUNK_TEXT, CHUNK_IMAGE = 0, 1  # mtmd_input_chunk_type


class InputText(Structure):
    _fields_: ClassVar = [
        ("text", c_char_p),
        ("text_len", c_size_t),
        ("add_special", c_bool),
        ("parse_special", c_bool),
    ]


class InputPart(Structure):
    _fields_: ClassVar = [("text", POINTER(InputText)), ("bitmap", c_void_p)]


class ContextParams(Structure):
    _fields_: ClassVar = [
        ("use_gpu", c_bool),
        ("device", c_void_p),
        ("print_timings", c_bool),
        ("n_threads", c_int),
        ("image_marker", c_char_p),
        ("media_marker", c_char_p),
        ("flash_attn_type", c_int),
        ("warmup", c_bool),
        ("image_min_tokens", c_int),
        ("image_max_tokens", c_int),
        ("cb_eval", c_void_p),
        ("cb_eval_user_data", c_void_p),
        ("batch_max_tokens", c_int32),
        ("progress_callback", c_void_p),
        ("progress_callback_user_data", c_void_p),
    ]


class DecoderPosition(Structure):
    _fields_: ClassVar = [("t", c_uint32), ("x", c_uint32), ("y", c_uint32), ("z", c_uint32)]


_P = c_void_p

_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "mtmd_context_params_default": (ContextParams, []),
    "mtmd_init_from_file": (_P, [c_char_p, _P, ContextParams]),
    "mtmd_free": (None, [_P]),
    "mtmd_log_set": (None, [_P, _P]),
    "mtmd_support_vision": (c_bool, [_P]),
    "mtmd_decode_use_non_causal": (c_bool, [_P, _P]),
    "mtmd_decode_use_mrope": (c_bool, [_P]),
    "mtmd_bitmap_init": (_P, [c_uint32, c_uint32, POINTER(c_uint8)]),
    "mtmd_bitmap_free": (None, [_P]),
    "mtmd_input_chunks_init": (_P, []),
    "mtmd_input_chunks_size": (c_size_t, [_P]),
    "mtmd_input_chunks_get": (_P, [_P, c_size_t]),
    "mtmd_input_chunks_free": (None, [_P]),
    "mtmd_input_chunk_get_type": (c_int, [_P]),
    "mtmd_input_chunk_get_tokens_text": (POINTER(c_int32), [_P, POINTER(c_size_t)]),
    "mtmd_input_chunk_get_tokens_image": (_P, [_P]),
    "mtmd_input_chunk_get_n_tokens": (c_size_t, [_P]),
    "mtmd_input_chunk_get_n_pos": (c_int32, [_P]),
    "mtmd_image_tokens_get_decoder_pos": (DecoderPosition, [_P, c_int32, c_size_t]),
    "mtmd_tokenize_from_parts": (c_int32, [_P, _P, POINTER(POINTER(InputPart)), c_size_t, c_bool]),
    "mtmd_encode_chunk": (c_int32, [_P, _P]),
    "mtmd_get_output_embd": (POINTER(c_float), [_P]),
}

# What mtmd_context_params_default() of the supported version answers, field by field.
_KNOWN_PARAMS = {
    "use_gpu": True,
    "device": None,
    "print_timings": True,
    "n_threads": 4,
    "image_marker": None,
    "media_marker": b"<__media__>",
    "flash_attn_type": -1,
    "warmup": True,
    "image_min_tokens": -1,
    "image_max_tokens": -1,
    "cb_eval": None,
    "batch_max_tokens": 1024,
    "progress_callback": None,
}


@cache
def load_mtmd() -> Any:
    """The library with mtmd's signatures declared too, checked against the known layout."""
    library = load_library()
    declare(library, _SIGNATURES)
    check_layout("projector", library.mtmd_context_params_default(), _KNOWN_PARAMS)
    library.mtmd_log_set(library._on_log, None)
    return library
