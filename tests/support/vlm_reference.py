"""Computes logits of a prompt with pictures as mlx_vlm does: all at once, without a cache.

Pixels come from the image processors of transformers and of mlx_vlm, so that ours are compared,
too.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from PIL import Image

import rekindle.engine.mlx  # noqa: F401  # before mlx_lm, whose import it makes harmless
from rekindle.engine.base import Row
from rekindle.protocol.requests import Picture
from rekindle.tokens import MEDIA_BIT

Pixels = dict[str, mx.array]


def as_image(picture: Picture) -> Image.Image:
    return Image.frombytes("RGB", (picture.width, picture.height), picture.pixels)


def processed(folder: Path, pictures: Sequence[Picture]) -> Pixels:
    """The inputs of a vision tower for these pictures, from the processor of the family."""
    family = json.loads((folder / "config.json").read_text())["model_type"]
    about = json.loads((folder / "preprocessor_config.json").read_text())
    images: list[Any] = [as_image(each) for each in pictures]
    if family in ("smolvlm", "idefics3"):
        images = [images]
    found = _processor(family, about)(images=images)
    names = ("pixel_values", "image_grid_thw", "pixel_attention_mask")
    return {name: mx.array(np.asarray(found[name])) for name in names if name in found}


def _processor(family: str, about: dict[str, Any]) -> Any:
    if family.startswith("qwen"):
        from mlx_vlm.models.qwen3_vl.processing_qwen3_vl import Qwen3VLImageProcessor

        return Qwen3VLImageProcessor(**about)
    if family == "llava":
        from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

        return CLIPImageProcessorPil(**about)
    if family == "gemma3":
        from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

        return Gemma3ImageProcessorPil(**about)
    if family == "idefics3":
        from transformers.models.idefics3.image_processing_pil_idefics3 import (
            Idefics3ImageProcessorPil,
        )

        return Idefics3ImageProcessorPil(**about)
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    return SmolVLMImageProcessorPil(**about)


def reference_reply(
    folder: Path, ids: Sequence[int], pictures: Sequence[Picture], count: int
) -> list[int]:
    """The tokens that mlx_vlm generates greedily after these."""
    from mlx_vlm.generate import generate_step

    model, tokens = _prompt(folder, ids)
    pixels = processed(folder, pictures)
    steps = generate_step(
        tokens, model, pixels.pop("pixel_values"), None, max_tokens=count, temperature=0, **pixels
    )
    return [int(token) for token, _ in steps][:count]


def _prompt(folder: Path, ids: Sequence[int]) -> tuple[Any, mx.array]:
    """The model, and these tokens with the model's own token in place of those of pictures."""
    from mlx_vlm.utils import load_model

    model = load_model(folder)
    token = getattr(model.config, "image_token_id", None) or model.config.image_token_index
    return model, mx.array([[token if each >= MEDIA_BIT else each for each in ids]])


def reference_logits(folder: Path, ids: Sequence[int], pictures: Sequence[Picture]) -> Row:
    """The logits behind the last of these tokens."""
    model, tokens = _prompt(folder, ids)
    pixels = processed(folder, pictures)
    if model.config.model_type == "gemma3":
        logits = _gemma_logits(model, tokens, pixels["pixel_values"])
    else:
        logits = model(tokens, **pixels, mask=None).logits
    return np.array(logits[0, -1].astype(mx.float32))


def _gemma_logits(model: Any, tokens: mx.array, pixels: mx.array) -> mx.array:
    """mlx_vlm computes pictures of Gemma 3 causally. The model was trained with vectors that attend
    to all vectors of their own picture, so its layers get masks from here."""
    features = model.get_input_embeddings(tokens, pixels, mask=mx.ones(tokens.shape))
    text = model.config.text_config
    hidden = features.inputs_embeds * (text.hidden_size**0.5)
    is_picture = np.array(tokens[0]) == model.config.image_token_index
    runs = np.cumsum(np.diff(is_picture, prepend=False) & is_picture)
    place = np.arange(len(is_picture))
    together = (runs[:, None] == runs[None]) & is_picture[:, None] & is_picture[None]
    causal = place[:, None] >= place[None]
    near = place[:, None] - place[None] < text.sliding_window
    for number, layer in enumerate(model.language_model.layers):
        is_global = (number + 1) % text.sliding_window_pattern == 0
        mask = (causal if is_global else causal & near) | together
        hidden = layer(hidden, mx.array(mask), None)
    logits: mx.array = model.language_model.lm_head(model.language_model.model.norm(hidden))
    return logits
