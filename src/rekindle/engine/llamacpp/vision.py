"""Encodes pictures with the projector of a model, through mtmd, a part of llama.cpp.

Some models have their own tokens around a picture (`<start_of_image>`), and a large picture may be
cut into tiles with tokens between them. So a picture is a run of tokens with one or more spans that
are computed from vectors.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
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
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from rekindle.engine.base import EngineOptions, Matrix
from rekindle.engine.llamacpp.batch import PLACE, Places, join_places
from rekindle.engine.llamacpp.bindings import check_layout, declare, load_library
from rekindle.engine.llamacpp.model import LlamaModel
from rekindle.engine.pictures import Part, tokens_of
from rekindle.errors import BadRequest, ProjectorError, ServerError
from rekindle.protocol.requests import Picture
from rekindle.tokens import MIN_MEDIA_TOKENS, Tokens


class InputText(Structure):
    _fields_: ClassVar = [
        ("text", c_char_p), ("text_len", c_size_t), ("add_special", c_bool),
        ("parse_special", c_bool),
    ]  # fmt: skip


class InputPart(Structure):
    _fields_: ClassVar = [("text", POINTER(InputText)), ("bitmap", c_void_p)]


class MtmdContextParams(Structure):
    _fields_: ClassVar = [
        ("use_gpu", c_bool), ("device", c_void_p), ("print_timings", c_bool), ("n_threads", c_int),
        ("image_marker", c_char_p), ("media_marker", c_char_p), ("flash_attn_type", c_int),
        ("warmup", c_bool), ("image_min_tokens", c_int), ("image_max_tokens", c_int),
        ("cb_eval", c_void_p), ("cb_eval_user_data", c_void_p), ("batch_max_tokens", c_int32),
        ("progress_callback", c_void_p), ("progress_callback_user_data", c_void_p),
    ]  # fmt: skip


class DecoderPosition(Structure):
    _fields_: ClassVar = [("t", c_uint32), ("x", c_uint32), ("y", c_uint32), ("z", c_uint32)]


_P = c_void_p

_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "mtmd_context_params_default": (MtmdContextParams, []),
    "mtmd_init_from_file": (_P, [c_char_p, _P, MtmdContextParams]),
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

# Default parameters of the supported version.
_KNOWN_PARAMS = {
    "use_gpu": True, "device": None, "print_timings": True, "n_threads": 4, "image_marker": None,
    "media_marker": b"<__media__>", "flash_attn_type": -1, "warmup": True, "image_min_tokens": -1,
    "image_max_tokens": -1, "cb_eval": None, "batch_max_tokens": 1024, "progress_callback": None,
}  # fmt: skip


@cache
def load_mtmd() -> Any:
    """Load the library, declare the functions of `mtmd.h`, and check the layouts."""
    library = load_library()
    declare(library, _SIGNATURES)
    check_layout("projector", library.mtmd_context_params_default(), _KNOWN_PARAMS)
    library.mtmd_log_set(library._on_log, None)
    return library


class Projector:
    """Owns the native projector; raises ProjectorError if the file does not fit the model.

    `tokens` may be called from any thread, `encode` only from the thread of the engine.
    """

    def __init__(self, model: LlamaModel, options: EngineOptions, path: Path) -> None:
        self._library = load_mtmd()
        self._width = int(self._library.llama_model_n_embd_inp(model.native))
        self._native = self._load(model, options, path)
        self._parts = lru_cache(256)(self._read_parts)  # by width and height
        #: With M-RoPE the tokens of a picture share a position, and their vectors end in a place.
        self.has_places = bool(self._library.mtmd_decode_use_mrope(self._native))
        try:
            self._check(path.name)
            #: Every vector of a picture sees all others, so they are computed in one step.
            self.is_whole = bool(self._library.mtmd_decode_use_non_causal(self._native, None))
            large = self._parts(4096, 4096)  # no picture takes more tokens in one span
            if any(token < 0 for part in large for token in part.ids):
                raise ProjectorError(
                    f"{options.path.name} lacks tokens that {path.name} puts around tiles"
                )
            self.max_vectors = max(part.vectors for part in large)
        except BaseException:
            self.close()
            raise

    def _load(self, model: LlamaModel, options: EngineOptions, path: Path) -> int:
        params = self._library.mtmd_context_params_default()
        params.use_gpu = model.gpu_layers(options) > 0
        params.n_threads = options.threads
        params.print_timings = params.warmup = False
        native = self._library.mtmd_init_from_file(str(path).encode(), model.native, params)
        if not native:
            raise ProjectorError(
                f"{path.name} is not a projector for {options.path.name}: the file is damaged, was "
                "made for another model, or is newer than the pinned llama.cpp"
            )
        return int(native)

    def _check(self, name: str) -> None:
        """Refuse projectors that would be computed wrongly.

        The rows of a picture have to follow each other, in ordinary positions or in those of
        M-RoPE. Its tokens may depend on its size only.
        """
        if not self._library.mtmd_support_vision(self._native):
            raise ProjectorError(f"{name} does not encode pictures")
        with self._chunks(512, 512, None, copies=2) as chunks:
            images = [each for each in chunks if self._is_image(each)]
            has_known_positions = all(map(self._has_known_positions, images))
            counts = [self._library.mtmd_input_chunk_get_n_tokens(each) for each in images]
        half = len(counts) // 2
        if not has_known_positions:
            raise ProjectorError(f"{name} uses an unsupported kind of picture positions")
        if not counts or counts[:half] != counts[half:]:
            raise ProjectorError(f"{name} encodes pictures by their place, which is unsupported")

    def _has_known_positions(self, chunk: int) -> bool:
        positions = self._positions(chunk)
        count = int(self._library.mtmd_input_chunk_get_n_pos(chunk))
        if not self.has_places:
            return bool(np.array_equal(positions[:, 0], np.arange(count)))
        times, columns, rows = positions.T
        width = int(columns.max()) + 1
        is_row_by_row = np.array_equal(rows * width + columns, np.arange(len(positions)))
        return is_row_by_row and not times.any() and count == positions.max() + 1

    def _positions(self, chunk: int) -> Places:
        image = self._library.mtmd_input_chunk_get_tokens_image(chunk)
        read = self._library.mtmd_image_tokens_get_decoder_pos
        count = self._library.mtmd_input_chunk_get_n_tokens(chunk)
        positions = (read(image, 0, token) for token in range(count))
        return np.array([(each.t, each.x, each.y) for each in positions], np.int32)

    def close(self) -> None:
        if self._native:
            self._library.mtmd_free(self._native)
            self._native = 0

    def tokens(self, width: int, height: int, digest: bytes) -> Tokens:
        """Return the tokens of a picture; raises BadRequest if it cannot be encoded."""
        return tokens_of(self._parts(width, height), digest)

    def _read_parts(self, width: int, height: int) -> tuple[Part, ...]:
        with self._chunks(width, height, None) as chunks:
            parts = tuple(map(self._part, chunks))
        sizes = [part.vectors for part in parts if part.vectors]
        if not sizes or min(sizes) < MIN_MEDIA_TOKENS:
            raise BadRequest(
                f"A picture of {width} x {height} pixels is too small for this model.",
                param="messages",
            )
        return parts

    def _part(self, chunk: int) -> Part:
        if self._is_image(chunk):
            vectors = self._library.mtmd_input_chunk_get_n_tokens(chunk)
            positions = self._library.mtmd_input_chunk_get_n_pos(chunk)
            return Part(vectors=int(vectors), positions=int(positions))
        count = ctypes.c_size_t()
        ids = self._library.mtmd_input_chunk_get_tokens_text(chunk, ctypes.byref(count))
        return Part(ids=tuple(ids[: count.value]))

    def _is_image(self, chunk: int) -> bool:
        return bool(self._library.mtmd_input_chunk_get_type(chunk) == 1)  # an image

    @contextmanager
    def _chunks(
        self, width: int, height: int, pixels: bytes | None, *, copies: int = 1
    ) -> Iterator[list[int]]:
        """Split a picture as mtmd does. Without pixels its tokens can only be counted."""
        library = self._library
        buffer = None
        if pixels is not None:
            view = np.frombuffer(pixels, np.uint8)
            buffer = view.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        bitmap = library.mtmd_bitmap_init(width, height, buffer)
        chunks = library.mtmd_input_chunks_init()
        try:
            part = ctypes.pointer(InputPart(None, bitmap))
            parts = (ctypes.POINTER(InputPart) * copies)(*[part] * copies)
            if library.mtmd_tokenize_from_parts(self._native, chunks, parts, copies, False):
                raise BadRequest(
                    f"This model cannot encode a picture of {width} x {height} pixels.",
                    param="messages",
                )
            count = library.mtmd_input_chunks_size(chunks)
            yield [library.mtmd_input_chunks_get(chunks, index) for index in range(count)]
        finally:
            library.mtmd_input_chunks_free(chunks)
            library.mtmd_bitmap_free(bitmap)

    def shape(self, tokens: Seq[int]) -> tuple[int, int]:
        """Return the shape of the vectors of these tokens, which llama.cpp does not check."""
        return len(tokens), self._width + self.has_places * PLACE

    def encode(self, picture: Picture) -> list[Matrix]:
        with self._chunks(picture.width, picture.height, picture.pixels) as chunks:
            return [self._encode(chunk) for chunk in chunks if self._is_image(chunk)]

    def _encode(self, chunk: int) -> Matrix:
        if self._library.mtmd_encode_chunk(self._native, chunk):
            raise ServerError("the projector failed to encode a picture; see the log")
        rows = self._library.mtmd_input_chunk_get_n_tokens(chunk)
        output = self._library.mtmd_get_output_embd(self._native)  # valid until the next call
        vectors = np.ctypeslib.as_array(output, shape=(rows, self._width))
        if self.has_places:
            return join_places(vectors, self._positions(chunk)[:, 1:])
        return vectors.copy()
