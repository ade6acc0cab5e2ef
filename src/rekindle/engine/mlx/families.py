"""Adapts each family of vision models: the tokens of a picture, its pixels, and its vectors.

mlx_vlm computes vectors of a whole prompt. An adapter calls the vision tower and the projector of a
loaded mlx_vlm model for one picture, so that its vectors can be kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from rekindle.engine.base import Matrix
from rekindle.engine.mlx.pixels import (
    CLIP_MEAN,
    CLIP_STD,
    HALF,
    Normaliser,
    Patches,
    SquareCrop,
    Tiles,
    as_image,
)
from rekindle.engine.mlx.positions import PLACE
from rekindle.engine.pictures import Part
from rekindle.errors import ProjectorError
from rekindle.protocol.requests import Picture
from rekindle.tokens import Tokenizer

BICUBIC, BILINEAR, LANCZOS = 3, 2, 1  # Pillow's numbers
Parts = tuple[Part, ...]


class Family(Protocol):
    """The pictures of one loaded model."""

    extra_columns: int  # of a vector, after those that enter the first layer

    def parts(self, width: int, height: int) -> Parts:
        """Return the parts of a picture of this size. Callable from any thread. Raises
        BadRequest."""

    def encode(self, picture: Picture) -> list[Matrix]:
        """Return the vectors of each span of the picture."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What an adapter is built from."""

    model: Any  # of mlx_vlm
    about: dict[str, Any]  # parameters of the preprocessor
    tokenizer: Tokenizer

    def text(self, text: str) -> Part:
        return Part(ids=tuple(self.tokenizer.encode(text, special=False)))

    def control(self, text: str) -> Part:
        token = self.tokenizer.control_texts.get(text)
        if token is None:
            raise ProjectorError(f"its vocabulary has no token {text}, which belongs to pictures")
        return Part(ids=(token,))


def rows(array: mx.array) -> Matrix:
    found: Matrix = np.array(array.astype(mx.float32))
    return found.reshape(-1, found.shape[-1])


class Llava:
    """One square, and the patches of one or more layers of a CLIP or SigLIP tower."""

    extra_columns = 0

    def __init__(self, loaded: Loaded) -> None:
        self._model, config = loaded.model, loaded.model.config
        self._how = Normaliser.of(loaded.about, CLIP_MEAN, CLIP_STD, BICUBIC)
        vision = config.vision_config
        self._crop = SquareCrop.of(loaded.about, vision.image_size)
        layers = config.vision_feature_layer
        self._layers = [layers] if isinstance(layers, int) else list(layers)
        has_class = vision.model_type == "clip_vision_model"
        #: The first vector of a layer, which stands for the whole picture, may be left out.
        self._first = 1 if config.vision_feature_select_strategy == "default" else 0
        side = vision.image_size // vision.patch_size
        vectors = side * side + has_class - self._first
        self._parts = (Part(vectors=vectors, positions=vectors),)

    def parts(self, width: int, height: int) -> Parts:
        self._crop.check(width, height)
        return self._parts

    def encode(self, picture: Picture) -> list[Matrix]:
        numbers = self._how.numbers(self._crop.apply(as_image(picture), self._how))
        *_, layers = self._model.vision_tower(mx.array(numbers)[None], output_hidden_states=True)
        chosen = [layers[layer][:, self._first :] for layer in self._layers]
        return [rows(self._model.multi_modal_projector(mx.concatenate(chosen, axis=-1)))]


class Gemma3:
    """One square, whose vectors all attend to each other."""

    extra_columns = 0

    def __init__(self, loaded: Loaded) -> None:
        self._model, config = loaded.model, loaded.model.config
        self._how = Normaliser.of(loaded.about, HALF, HALF, BILINEAR)
        self._crop = SquareCrop.of(loaded.about, config.vision_config.image_size)
        vectors = self._model.multi_modal_projector.tokens_per_side**2
        self._parts = (
            loaded.text("\n\n"),
            loaded.control("<start_of_image>"),
            Part(vectors=vectors, positions=vectors),
            loaded.control("<end_of_image>"),
            loaded.text("\n\n"),
        )

    def parts(self, width: int, height: int) -> Parts:
        self._crop.check(width, height)
        return self._parts

    def encode(self, picture: Picture) -> list[Matrix]:
        numbers = self._how.numbers(self._crop.apply(as_image(picture), self._how))
        found, _, _ = self._model.vision_tower(mx.array(numbers)[None], output_hidden_states=True)
        return [rows(self._model.multi_modal_projector(found))]


class Idefics3:
    """Square tiles with tokens for their places, then the whole picture as one more tile."""

    extra_columns = 0

    def __init__(self, loaded: Loaded) -> None:
        self._model, config = loaded.model, loaded.model.config
        self._how = Normaliser.of(loaded.about, HALF, HALF, LANCZOS)
        vision = config.vision_config
        self._tiles = Tiles.of(loaded.about, vision.image_size)
        self._side = vision.image_size // vision.patch_size
        vectors = self._side**2 // config.scale_factor**2
        self._tile = Part(vectors=vectors, positions=vectors)
        self._around = loaded.control("<fake_token_around_image>")
        self._whole = loaded.control("<global-img>")
        self._line, self._lines = loaded.text("\n"), loaded.text("\n\n")
        self._loaded = loaded
        self._cut = lru_cache(256)(self._parts)
        self._cut(*(self._tiles.most,) * 2)  # raises if a token for a place is missing

    def parts(self, width: int, height: int) -> Parts:
        return self._cut(*self._tiles.grid(width, height))

    def _parts(self, columns: int, lines: int) -> Parts:
        found: list[Part] = []
        for line in range(1, lines + 1):
            for column in range(1, columns + 1):
                place = self._loaded.control(f"<row_{line}_col_{column}>")
                found += [self._around, place, self._tile]
            found.append(self._line if line < lines else self._lines)
        return (*found, self._around, self._whole, self._tile, self._around)

    def encode(self, picture: Picture) -> list[Matrix]:
        return [self._encode(tile) for tile in self._tiles.cut(as_image(picture), self._how)]

    def _encode(self, tile: Any) -> Matrix:
        pixels = mx.array(self._how.numbers(tile))[None]
        patches = mx.ones((1, self._side, self._side), mx.bool_)
        found, *_ = self._model.vision_model(
            pixels, patch_attention_mask=patches, output_hidden_states=True
        )
        return rows(self._model.connector(found))


class QwenVl:
    """Patches of a picture of any size. Vectors have a row and a column (M-RoPE)."""

    def __init__(self, loaded: Loaded) -> None:
        self._tower, config = loaded.model.vision_tower, loaded.model.config
        vision = config.vision_config
        self._patches = Patches.of(
            loaded.about, vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size
        )
        self._how = self._normaliser(loaded.about)
        self._begin = loaded.control("<|vision_start|>")
        self._end = loaded.control("<|vision_end|>")
        levels = len(getattr(vision, "deepstack_visual_indexes", None) or ())
        self.extra_columns = levels * config.text_config.hidden_size + PLACE

    @staticmethod
    def _normaliser(about: dict[str, Any]) -> Normaliser:
        return Normaliser.of(about, CLIP_MEAN, CLIP_STD, BICUBIC)

    def parts(self, width: int, height: int) -> Parts:
        columns, lines = self._grid(*self._patches.grid(width, height))
        picture = Part(vectors=columns * lines, positions=max(columns, lines))
        return self._begin, picture, self._end

    def _grid(self, columns: int, lines: int) -> tuple[int, int]:
        return columns // self._patches.merge, lines // self._patches.merge

    def encode(self, picture: Picture) -> list[Matrix]:
        patches, (columns, lines) = self._patches.cut(as_image(picture), self._how)
        dtype = self._tower.patch_embed.proj.weight.dtype
        grid = mx.array([[1, lines, columns]])
        found = self._tower(mx.array(patches).astype(dtype), grid)
        levels = [found] if isinstance(found, mx.array) else [found[0], *found[1]]
        columns, lines = self._grid(columns, lines)
        places = np.indices((lines, columns), np.float32).reshape(2, -1).T
        lengths = np.full((len(places), 1), max(columns, lines), np.float32)
        return [np.concatenate([*map(rows, levels), places, lengths], axis=1)]


class Qwen3Vl(QwenVl):
    """The same, with more vectors for later layers (deepstack)."""

    @staticmethod
    def _normaliser(about: dict[str, Any]) -> Normaliser:
        return Normaliser.of(about, HALF, HALF, BICUBIC)


#: The adapter of each supported `model_type`.
FAMILIES: Mapping[str, Callable[[Loaded], Family]] = {
    "llava": Llava,
    "idefics3": Idefics3,
    "smolvlm": Idefics3,
    "gemma3": Gemma3,
    "qwen2_vl": QwenVl,
    "qwen2_5_vl": QwenVl,
    "qwen3_vl": Qwen3Vl,
    "qwen3_vl_moe": Qwen3Vl,
}
