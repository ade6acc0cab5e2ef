"""Lists every engine that has to fulfil the contract."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from rekindle.engine.base import Engine, EngineOptions
from rekindle.engine.llamacpp.engine import LlamaCppEngine
from rekindle.engine.mlx.engine import MlxEngine
from tests.support.fake import FakeEngine
from tests.support.numpy_engine import SUFFIX
from tests.support.numpy_engine.engine import NumpyEngine
from tests.support.numpy_engine.model import write_numpy
from tests.support.tiny import (
    WIDTH,
    TinyModel,
    write_gemma3,
    write_lfm2,
    write_llama,
    write_mamba,
)
from tests.support.tiny_mlx import write_tiny_mlx
from tests.support.tiny_projector import (
    write_gemma3_projector,
    write_llava_projector,
    write_qwen2vl_projector,
)
from tests.support.tiny_qwen import write_qwen2vl, write_qwen35
from tests.support.tiny_vision import write_tiny_vision

LAYERS = 2
PARK_TOKENS = 400
TRUNCATING = (
    *("fake", "fake-own", "fake-parking", "numpy"),
    *("llama", "llama-parking", "gemma3", "gemma3-narrow", "llama-q8_0", "qwen2vl"),
    *("mlx-llama", "mlx-llama-q8_0", "mlx-vision-qwen3_vl"),
)
WHOLE = (  # their state cannot be truncated
    *("fake-whole", "mamba", "lfm2", "qwen35"),
    *("mlx-gemma3", "mlx-mamba", "mlx-falcon_h1"),
)
SEEING = (  # those that take pictures
    *("fake", "numpy", "llama", "gemma3", "lfm2", "qwen2vl", "qwen35"),
    *("mlx-vision-llava", "mlx-vision-gemma3", "mlx-vision-qwen2_vl", "mlx-vision-qwen3_vl"),
)
SPLITTING = (  # those that compute a picture in several steps
    *("fake", "numpy", "llama", "lfm2", "qwen2vl", "qwen35"),
    *("mlx-vision-llava", "mlx-vision-qwen2_vl", "mlx-vision-qwen3_vl"),
)

PARKING = ("fake-parking", "llama-parking", "qwen2vl-parking")

SEVERAL_KV_TYPES = (
    *("fake", "fake-whole", "numpy"),
    *("llama-wide", "llama-q8_0", "gemma3-wide", "lfm2-wide", "qwen2vl-wide"),
    *("mlx-llama-wide", "mlx-gemma3-wide"),
)


def write_wide_llama(path: Path) -> Path:
    """Heads are 32 wide, as 8-bit cells need."""
    model = TinyModel(path, "llama", LAYERS, seed=0, context=4096)
    model.number("attention.head_count", 2)
    model.number("attention.head_count_kv", 1)
    model.number("rope.dimension_count", WIDTH // 2)
    model.ones("output_norm.weight", WIDTH)
    for layer in range(LAYERS):
        block = f"blk.{layer}."
        model.ones(block + "attn_norm.weight", WIDTH)
        model.ones(block + "ffn_norm.weight", WIDTH)
        model.attention_and_hidden(block)
    model.finish()
    return path


WRITERS: dict[str, Callable[[Path], Path]] = {
    "llama": write_llama,
    "llama-parking": write_llama,
    "gemma3": write_gemma3,
    "gemma3-narrow": partial(write_gemma3, window=40),  # narrower than the usual block
    "llama-q8_0": write_wide_llama,
    "llama-wide": write_wide_llama,
    "mamba": write_mamba,
    "lfm2": write_lfm2,
    "lfm2-wide": partial(write_lfm2, head_width=32),
    "gemma3-wide": partial(write_gemma3, head_width=32),
    "qwen2vl": write_qwen2vl,
    "qwen2vl-parking": write_qwen2vl,
    "qwen35": write_qwen35,
    "qwen2vl-wide": partial(write_qwen2vl, head_width=32),
}


PROJECTORS: dict[str, Callable[[Path], Path]] = {
    "llama": write_llava_projector,
    "gemma3": write_gemma3_projector,
    "lfm2": write_llava_projector,
    "qwen2vl": write_qwen2vl_projector,
    "qwen2vl-parking": write_qwen2vl_projector,
    "qwen35": write_qwen2vl_projector,
}


def build(name: str, folder: Path) -> Engine:
    if name == "numpy":
        path = write_numpy(folder / f"tiny{SUFFIX}", context=1024)
        return NumpyEngine(EngineOptions(path=path, parallel=4))
    if name.startswith("fake"):
        return FakeEngine(
            can_truncate=name != "fake-whole",
            sees=name in SEEING,
            shares_cells=name != "fake-own",
            park_tokens=PARK_TOKENS if name in PARKING else 0,
        )
    kv_type = "q8_0" if name.endswith("q8_0") else "f16"
    if name.startswith("mlx-vision-"):
        path = write_tiny_vision(folder / name, name.removeprefix("mlx-vision-"))
        return MlxEngine(EngineOptions(path=path, mmproj=path, parallel=4, context_tokens=600))
    if name.startswith("mlx-"):
        path = write_tiny_mlx(folder / name, name.removeprefix("mlx-").replace("q8_0", "wide"))
        return MlxEngine(EngineOptions(path=path, parallel=4, context_tokens=600, kv_type=kv_type))
    path = WRITERS[name](folder / f"{name}.gguf")
    write_projector = PROJECTORS.get(name)
    mmproj = write_projector(folder / "mmproj.gguf") if write_projector else None
    engine = LlamaCppEngine(
        EngineOptions(
            path=path,
            mmproj=mmproj,
            parallel=4,
            threads=1,
            kv_type=kv_type,
            park_fraction=0.01 if name in PARKING else None,
        )
    )
    if engine.sequences.parking:
        engine.sequences.parking.tokens = PARK_TOKENS
    return engine


every_engine = pytest.mark.parametrize("engine", [*TRUNCATING, *WHOLE], indirect=True)
truncating_engines = pytest.mark.parametrize("engine", TRUNCATING, indirect=True)
seeing_engines = pytest.mark.parametrize("engine", SEEING, indirect=True)
blind_engines = pytest.mark.parametrize(
    "engine", ["fake-whole", "mamba", "mlx-llama"], indirect=True
)
parking_engines = pytest.mark.parametrize("engine", PARKING, indirect=True)
several_kv_types = pytest.mark.parametrize("engine", SEVERAL_KV_TYPES, indirect=True)
splitting_engines = pytest.mark.parametrize("engine", SPLITTING, indirect=True)
whole_engines = pytest.mark.parametrize("engine", WHOLE, indirect=True)
