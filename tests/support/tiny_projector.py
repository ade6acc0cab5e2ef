"""Writes tiny random projectors for the tiny models.

There are LLaVA's kind, Gemma's with bidirectional attention and tokens around a picture, and Qwen-
VL's with positions in rows and columns.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.support.tiny import WIDTH

VIT_WIDTH, VIT_HIDDEN, VIT_HEADS, VIT_LAYERS, PATCH = 32, 64, 2, 1, 8


def write_llava_projector(path: Path, *, seed: int = 0, width: int = WIDTH) -> Path:
    """One vector for each of 4 x 4 patches."""
    writer = _Writer(path, "mlp", pixels=32, seed=seed)
    writer.file.add_array("clip.vision.feature_layer", [VIT_LAYERS])
    writer.linear("mm.0", VIT_WIDTH, width)
    writer.linear("mm.2", width, width)
    return writer.finish(path)


def write_gemma3_projector(path: Path, *, seed: int = 0) -> Path:
    """One vector for each of 10 x 10 squares of 2 x 2 patches, which is more than a prefill
    chunk."""
    writer = _Writer(path, "gemma3", pixels=160, seed=seed)
    writer.file.add_uint32("clip.vision.projector.scale_factor", 2)
    writer.matrix("mm.input_projection.weight", VIT_WIDTH, WIDTH)
    writer.file.add_tensor("mm.soft_emb_norm.weight", np.ones(VIT_WIDTH, np.float32))
    return writer.finish(path)


def write_idefics3_projector(path: Path) -> Path:
    """Like SmolVLM, which splits a large picture into tiles of 32 x 32 pixels."""
    writer = _Writer(path, "idefics3", pixels=32, seed=0)
    writer.file.add_uint32("clip.vision.projector.scale_factor", 2)
    writer.file.add_uint32("clip.vision.preproc_image_size", 64)
    writer.matrix("mm.model.fc.weight", WIDTH, 4 * VIT_WIDTH)
    return writer.finish(path)


def write_qwen2vl_projector(path: Path, *, width: int = WIDTH) -> Path:
    """One vector per square of 2 x 2 patches, at least 8, for pictures of any shape."""
    writer = _Writer(path, "qwen2vl_merger", pixels=32, seed=0, has_positions=False)
    writer.kernel("v.patch_embd.weight.1")
    writer.linear("mm.0", 4 * VIT_WIDTH, 4 * VIT_WIDTH)
    writer.linear("mm.2", 4 * VIT_WIDTH, width)
    return writer.finish(path)


class _Writer:
    """A vision transformer with one layer. Subclasses and callers add the rest."""

    def __init__(
        self, path: Path, kind: str, *, pixels: int, seed: int, has_positions: bool = True
    ) -> None:
        self._random = np.random.default_rng(seed)
        self.file: Any = gguf.GGUFWriter(str(path), "clip")
        self.file.add_type("mmproj")
        self.file.add_bool("clip.has_vision_encoder", True)
        self.file.add_string("clip.projector_type", kind)
        self.file.add_bool("clip.use_gelu", True)
        for key, value in {
            "image_size": pixels,
            "patch_size": PATCH,
            "embedding_length": VIT_WIDTH,
            "feed_forward_length": VIT_HIDDEN,
            "block_count": VIT_LAYERS,
            "attention.head_count": VIT_HEADS,
            "projection_dim": WIDTH,
        }.items():
            self.file.add_uint32(f"clip.vision.{key}", value)
        self.file.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-5)
        for name in ("image_mean", "image_std"):
            self.file.add_array(f"clip.vision.{name}", [0.5, 0.5, 0.5])
        self.kernel("v.patch_embd.weight")
        if has_positions:
            self.file.add_tensor("v.patch_embd.bias", np.zeros(VIT_WIDTH, np.float32))
            positions = self._random.standard_normal(((pixels // PATCH) ** 2, VIT_WIDTH))
            self.file.add_tensor("v.position_embd.weight", positions.astype(np.float32))
        self._add_transformer()

    def kernel(self, name: str) -> None:
        values = self._random.standard_normal((VIT_WIDTH, 3, PATCH, PATCH))
        self.file.add_tensor(name, (values * 0.1).astype(np.float16))

    def _add_transformer(self) -> None:
        self.norm("v.post_ln")
        for layer in range(VIT_LAYERS):
            block = f"v.blk.{layer}."
            for name in ("attn_q", "attn_k", "attn_v", "attn_out"):
                self.linear(block + name, VIT_WIDTH, VIT_WIDTH)
            self.linear(block + "ffn_up", VIT_WIDTH, VIT_HIDDEN)
            self.linear(block + "ffn_down", VIT_HIDDEN, VIT_WIDTH)
            self.norm(block + "ln1")
            self.norm(block + "ln2")

    def matrix(self, name: str, rows: int, columns: int) -> None:
        values = self._random.standard_normal((rows, columns)) * columns**-0.5
        self.file.add_tensor(name, values.astype(np.float32))

    def linear(self, name: str, columns: int, rows: int) -> None:
        self.matrix(f"{name}.weight", rows, columns)
        self.file.add_tensor(f"{name}.bias", np.zeros(rows, np.float32))

    def norm(self, name: str) -> None:
        self.file.add_tensor(f"{name}.weight", np.ones(VIT_WIDTH, np.float32))
        self.file.add_tensor(f"{name}.bias", np.zeros(VIT_WIDTH, np.float32))

    def finish(self, path: Path) -> Path:
        self.file.write_header_to_file()
        self.file.write_kv_data_to_file()
        self.file.write_tensors_to_file()
        self.file.close()
        return path
