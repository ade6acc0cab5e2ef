"""Serves pictures with MLX models: loads a folder with mlx_vlm, and computes text and vectors.

The language model gets the caches of mlx_lm and, for a picture, vectors in place of tokens. Nothing
about a sequence is kept in the model, so several sequences can take turns.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache, RotatingKVCache

from rekindle.engine.base import EngineOptions, Matrix, OnProgress
from rekindle.engine.mlx.families import FAMILIES, Loaded
from rekindle.engine.mlx.model import (
    CONTEXT_LENGTHS,
    UNLIMITED_TOKENS,
    LoadedModel,
    check_model,
    count_parameters,
    first_number,
    one_sentence,
    quantisation_of,
    read_weights,
    state_fingerprint,
)
from rekindle.engine.mlx.pixels import PREPROCESSOR, PROCESSOR, read_parameters
from rekindle.engine.mlx.positions import PLACE, PositionCache, add_image, add_text
from rekindle.engine.pictures import tokens_of
from rekindle.errors import ModelError, ProjectorError, ServerError
from rekindle.models.folder import CONFIG, check_folder, has_vision, read_json, weight_files
from rekindle.models.safetensors import read_header
from rekindle.protocol.requests import IMAGE, TEXT, Picture
from rekindle.tokens import Tokenizer, Tokens

Caches = Seq[Any]


class LanguageModel:
    """The language model of a vision model, called like a model of mlx_lm."""

    def __init__(self, model: Any) -> None:
        """`model` is one of mlx_vlm, with its vision tower."""
        self.whole = model
        self._language = model.language_model
        probe = self._embed(mx.zeros((1, 1), mx.uint32))
        self._dtype, self.width = probe.dtype, int(probe.shape[-1])

    def _embed(self, tokens: mx.array) -> mx.array:
        inner = getattr(self._language, "model", self._language)
        found: mx.array = inner.embed_tokens(tokens)
        return found

    def make_cache(self) -> list[Any]:
        return [KVCache() for _ in self._language.layers]

    def __call__(self, tokens: mx.array, cache: Caches | None = None) -> mx.array:
        """Return lazy logits of text: (rows, tokens, vocabulary)."""
        found: mx.array = self._language(tokens, cache=cache or self.make_cache()).logits
        return found

    def show(self, vectors: Matrix, cache: Caches) -> mx.array:
        """Append vectors of one picture to one sequence. Returns lazy logits."""
        found: mx.array = self._language(
            None, inputs_embeds=self._entering(vectors), cache=cache
        ).logits
        return found

    def _entering(self, vectors: Matrix) -> mx.array:
        """Return what enters the first layer: (1, vectors, width)."""
        return mx.array(vectors[:, : self.width])[None].astype(self._dtype)


class GemmaLanguageModel(LanguageModel):
    """Vectors of one picture attend to all of it, in layers with and without a window.

    mlx_vlm gives all layers one mask, so the layers are called here.
    """

    def make_cache(self) -> list[Any]:
        config = self._language.config
        pattern = config.sliding_window_pattern
        return [
            KVCache() if layer % pattern == pattern - 1 else RotatingKVCache(config.sliding_window)
            for layer in range(len(self._language.layers))
        ]

    def show(self, vectors: Matrix, cache: Caches) -> mx.array:
        window = self._language.config.sliding_window
        hidden, count = self._entering(vectors), len(vectors)
        for layer, kept in zip(self._language.layers, cache, strict=True):
            size = window if isinstance(kept, RotatingKVCache) else None
            mask = kept.make_mask(count, window_size=size, return_array=True)
            own = mx.arange(mask.shape[-1]) >= mask.shape[-1] - count
            hidden = layer(hidden, mask | own, kept)
        found: mx.array = self._language.lm_head(self._language.model.norm(hidden))
        return found


class MropeLanguageModel(LanguageModel):
    """Positions are in the last cache, and are given to every call."""

    def make_cache(self) -> list[Any]:
        return [*super().make_cache(), PositionCache()]

    def __call__(self, tokens: mx.array, cache: Caches | None = None) -> mx.array:
        *layers, places = cache or self.make_cache()
        hidden = self._language.model(tokens, cache=layers, position_ids=add_text(places, tokens))
        return self._logits(hidden)

    def show(self, vectors: Matrix, cache: Caches) -> mx.array:
        *layers, kept = cache
        places = vectors[:, -PLACE:]
        positions = add_image(kept, mx.array(places), begins=not places[0, :2].any())
        hidden = self._language.model(
            None,
            inputs_embeds=self._entering(vectors),
            cache=layers,
            position_ids=positions,
            **self._levels(vectors),
        )
        return self._logits(hidden)

    def _levels(self, vectors: Matrix) -> dict[str, mx.array]:
        """Return the vectors for layers after the first (deepstack), if the model has some."""
        later = vectors[:, self.width : -PLACE]
        if not later.shape[1]:
            return {}
        levels = later.reshape(len(vectors), -1, self.width).transpose(1, 0, 2)
        return {
            "deepstack_visual_embeds": mx.array(levels).astype(self._dtype),
            "visual_pos_masks": mx.ones((1, len(vectors)), mx.bool_),
        }

    def _logits(self, hidden: mx.array) -> mx.array:
        language = self._language
        tied = language.args.tie_word_embeddings
        head = language.model.embed_tokens.as_linear if tied else language.lm_head
        found: mx.array = head(hidden)
        return found


def load_vision_model(options: EngineOptions, on_progress: OnProgress) -> LoadedModel:
    """Load a folder with its vision tower. Raises ProjectorError if only its text can be served."""
    folder = options.path
    tensors = check_folder(folder)
    check_model(folder, tensors)
    config = read_json(folder / CONFIG)
    _check_family(folder, config, options)
    _check_weights(folder)
    try:
        model = _load_whole(folder)
        read_weights(model, on_progress)
        language = _LANGUAGES.get(config["model_type"], LanguageModel)(model)
        logits = language(mx.zeros((1, 1), mx.uint32))  # lazy: only its shape is used
    except ModelError:
        raise
    except Exception as error:  # an inconsistent folder may fail anywhere in mlx_vlm
        raise ProjectorError(
            f"mlx_vlm cannot load the vision part of {folder.name} ({one_sentence(error)})"
        ) from error
    return LoadedModel(
        model=language,
        architecture=config["model_type"],
        parameters=count_parameters(model),
        quantization=quantisation_of(model, config),
        vocabulary_size=int(logits.shape[-1]),
        context_tokens=first_number(config, CONTEXT_LENGTHS) or UNLIMITED_TOKENS,
        fingerprint=state_fingerprint(
            folder,
            None,
            files=[path for name in (PREPROCESSOR, PROCESSOR) if (path := folder / name).is_file()],
            packages=("mlx-vlm", "pillow"),
        ),
        modalities=frozenset({TEXT, IMAGE}),
        whole_pictures=isinstance(language, GemmaLanguageModel),
    )


#: Families whose language model needs more than vectors in place of tokens.
_LANGUAGES: dict[str, type[LanguageModel]] = {
    "gemma3": GemmaLanguageModel,
    "qwen2_vl": MropeLanguageModel,
    "qwen2_5_vl": MropeLanguageModel,
    "qwen3_vl": MropeLanguageModel,
    "qwen3_vl_moe": MropeLanguageModel,
}


def _load_whole(folder: Path) -> Any:
    try:
        from mlx_vlm.utils import load_model  # takes a second, and is an extra
    except ImportError as error:
        raise ProjectorError(
            f"pictures of MLX models need more packages ({error}): pip install 'rekindle[mlx-vlm]'"
        ) from error
    return load_model(folder, lazy=True)


def _check_family(folder: Path, config: dict[str, Any], options: EngineOptions) -> None:
    kind = config["model_type"]
    if not has_vision(folder):
        raise ProjectorError(
            f"{folder.name} has no vision part (`vision_config` in {CONFIG}), so it reads only text"
        )
    if kind not in FAMILIES:
        raise ProjectorError(
            f"{folder.name} is a {kind} model, for which the vectors of a single picture cannot be "
            f"computed and kept. Models that read pictures: {', '.join(FAMILIES)}"
        )
    if options.adapter:
        raise ProjectorError("--adapter works only for text: merge it into the model, or omit it")


def _check_weights(folder: Path) -> None:
    """Refuse files that mlx_vlm would read unchecked, or rewrite while it reads them."""
    files = weight_files(folder)
    others = sorted(
        {*folder.glob("*.safetensors"), *folder.glob("offload_index.json")} - set(files)
    )
    if others:
        raise ProjectorError(
            f"{folder.name} has {others[0].name} next to model*.safetensors. Remove it, or serve "
            "the text only with --no-vlm"
        )
    for file in files:
        if any(each.dtype == "F8_E8M0" for each in read_header(file).tensors.values()):
            raise ProjectorError(f"{file.name} has scales of 8 bits, which mlx_vlm cannot read")


class Vision:
    """Lists and encodes the pictures of a loaded model. Raises ProjectorError if it cannot."""

    def __init__(self, model: LanguageModel, folder: Path, tokenizer: Tokenizer) -> None:
        kind = read_json(folder / CONFIG)["model_type"]
        try:
            loaded = Loaded(model.whole, read_parameters(folder), tokenizer)
            self._family = FAMILIES[kind](loaded)
        except ProjectorError as error:
            raise ProjectorError(f"{folder.name} cannot read pictures: {error}") from error
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ProjectorError(
                f"{folder.name} has a damaged {CONFIG} or {PREPROCESSOR} ({one_sentence(error)})"
            ) from error
        self._width = model.width + self._family.extra_columns

    def tokens(self, width: int, height: int, digest: bytes) -> Tokens:
        return tokens_of(self._family.parts(width, height), digest)

    def encode(self, picture: Picture) -> list[Matrix]:
        try:
            return [np.ascontiguousarray(vectors) for vectors in self._family.encode(picture)]
        except RuntimeError as error:  # of MLX, which has no memory, for example
            raise ServerError(f"the vision tower failed to encode an image: {error}") from error

    def shape(self, tokens: Seq[int]) -> tuple[int, int]:
        """Return the shape of the vectors of these tokens."""
        return len(tokens), self._width
