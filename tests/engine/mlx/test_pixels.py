"""Pixels are prepared like transformers' and mlx_vlm's image processors prepare them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlx_vlm.models.qwen3_vl.processing_qwen3_vl import Qwen3VLImageProcessor
from PIL import Image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from rekindle.engine.mlx.pixels import (
    CLIP_MEAN,
    CLIP_STD,
    HALF,
    Normaliser,
    Patches,
    SquareCrop,
    Tiles,
    as_image,
    read_parameters,
)
from tests.support.pictures import drawn

SIZES = [(1, 1), (9, 31), (31, 9), (48, 48), (64, 32), (100, 99), (333, 40), (37, 250)]
BICUBIC, BILINEAR, LANCZOS = 3, 2, 1


def image(size: tuple[int, int]) -> Image.Image:
    return as_image(drawn(1, *size))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "about",
    [
        {"size": {"shortest_edge": 48}, "crop_size": {"height": 48, "width": 48}},
        {"size": {"shortest_edge": 60}, "crop_size": {"height": 48, "width": 48}},
        {"size": {"height": 48, "width": 48}, "do_center_crop": False},
        {"size": {"shortest_edge": 48}, "crop_size": 48, "do_normalize": False, "resample": 2},
    ],
)
def test_squares_for_llava(size: tuple[int, int], about: dict[str, Any]) -> None:
    [expected] = CLIPImageProcessorPil(**about)(images=[image(size)])["pixel_values"]
    how = Normaliser.of(about, CLIP_MEAN, CLIP_STD, BICUBIC)
    found = how.numbers(SquareCrop.of(about, 48).apply(image(size), how))
    assert np.allclose(found.transpose(2, 0, 1), expected, atol=1e-5)


@pytest.mark.parametrize("size", SIZES)
def test_squares_for_gemma(size: tuple[int, int]) -> None:
    about: dict[str, Any] = {"size": {"height": 56, "width": 56}}
    [expected] = Gemma3ImageProcessorPil(**about)(images=[image(size)])["pixel_values"]
    how = Normaliser.of(about, HALF, HALF, BILINEAR)
    found = how.numbers(SquareCrop.of(about, 56).apply(image(size), how))
    assert np.allclose(found.transpose(2, 0, 1), expected, atol=1e-5)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("longest", "splits"), [(128, True), (32, True), (100, True), (96, False)])
def test_tiles_for_smolvlm(size: tuple[int, int], longest: int, splits: bool) -> None:
    about: dict[str, Any] = {
        "size": {"longest_edge": longest},
        "max_image_size": {"longest_edge": 32},
        "do_image_splitting": splits,
    }
    processor = SmolVLMImageProcessorPil(**about, return_row_col_info=True)
    expected = processor(images=[[image(size)]])
    how, tiles = Normaliser.of(about, HALF, HALF, LANCZOS), Tiles.of(about, 32)
    assert tiles.grid(*size) == (expected["cols"][0][0], expected["rows"][0][0])
    found = np.array([how.numbers(each) for each in tiles.cut(image(size), how)])
    assert np.allclose(found.transpose(0, 3, 1, 2), expected["pixel_values"][0], atol=1e-5)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("pixels", [(3136, 12845056), (256, 2304), (100, 6400)])
def test_patches_for_qwen(size: tuple[int, int], pixels: tuple[int, int]) -> None:
    about = {"min_pixels": pixels[0], "max_pixels": pixels[1], "patch_size": 4, "merge_size": 2}
    expected = Qwen3VLImageProcessor(**about)([image(size)])
    how, patches = Normaliser.of(about, HALF, HALF, BICUBIC), Patches.of(about, 4, 2, 2)
    found, (columns, rows) = patches.cut(image(size), how)
    assert [1, rows, columns] == expected["image_grid_thw"][0].tolist()
    assert np.allclose(found, expected["pixel_values"], atol=1e-5)


def test_parameters_are_read_from_both_files_and_null_means_the_default(tmp_path: Path) -> None:
    assert read_parameters(tmp_path) == {}
    (tmp_path / "preprocessor_config.json").write_text('{"size": 8, "do_normalize": null}')
    about = {"image_processor": {"size": 16, "resample": 3}}
    (tmp_path / "processor_config.json").write_text(json.dumps(about))
    assert read_parameters(tmp_path) == {"size": 16, "resample": 3}
