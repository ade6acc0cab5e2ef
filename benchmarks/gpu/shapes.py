"""Writes models with random f16 weights in the shapes of real models, and a real vocabulary.

`python benchmarks/gpu/shapes.py MODEL.gguf FILE` extracts the vocabulary, about 2 MB, from a model.
This helps on a machine to which the model is too large to copy.
"""

from __future__ import annotations

import struct
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rekindle.models.bert_gguf import Tensor, gguf_tensor
from rekindle.models.gguf import ARRAY, FIXED_BYTES, MAGIC, STRING, HeaderReader
from rekindle.models.gguf_writer import BOOL, Field, write_gguf

CONTEXT_TOKENS = 131_072
RANDOM_VALUES = 1 << 24  # random values for all weights, so that 16 GB take only seconds
SCALE = 0.02
FORMATS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", BOOL: "<?", 10: "<Q"}
LONGEST_TEXT = 1 << 20


@dataclass(frozen=True, slots=True)
class ModelShape:
    layers: int
    width: int
    feed_forward: int
    heads: int
    kv_heads: int

    def metadata(self, vocabulary: int) -> dict[str, Field]:
        numbers: dict[str, Field] = {
            "context_length": CONTEXT_TOKENS, "embedding_length": self.width,
            "block_count": self.layers, "feed_forward_length": self.feed_forward,
            "attention.head_count": self.heads, "attention.head_count_kv": self.kv_heads,
            "rope.dimension_count": self.width // self.heads, "vocab_size": vocabulary,
            "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 500_000.0,
        }  # fmt: skip
        named = {f"llama.{name}": number for name, number in numbers.items()}
        return {"general.architecture": "llama", **named}

    def tensors(self, vocabulary: int) -> dict[str, tuple[int, ...]]:
        """Rows and columns by name."""
        wide, kv_width = self.width, self.width // self.heads * self.kv_heads
        found: dict[str, tuple[int, ...]] = {
            "token_embd": (vocabulary, wide), "output_norm": (wide,), "output": (vocabulary, wide),
        }  # fmt: skip
        parts: dict[str, tuple[int, ...]] = {
            "attn_norm": (wide,), "ffn_norm": (wide,), "attn_output": (wide, wide),
            "attn_q": (wide, wide), "attn_k": (kv_width, wide), "attn_v": (kv_width, wide),
            "ffn_gate": (self.feed_forward, wide), "ffn_up": (self.feed_forward, wide),
            "ffn_down": (wide, self.feed_forward),
        }  # fmt: skip
        for layer in range(self.layers):
            found |= {f"blk.{layer}.{name}": shape for name, shape in parts.items()}
        return {f"{name}.weight": shape for name, shape in found.items()}


SHAPES = {
    "8b": ModelShape(36, 4096, 12_288, 32, 8),  # shape of Qwen3-8B
    "1b": ModelShape(20, 2048, 6144, 16, 8),
    "tiny": ModelShape(2, 128, 256, 2, 1),
}


def read_vocabulary(path: Path) -> dict[str, Field]:
    """The tokenizer fields of a GGUF file."""
    with path.open("rb") as file:
        header = HeaderReader(file, path.stat().st_size)
        header.skip(len(MAGIC) + 4 + 8)  # version and number of tensors
        fields: dict[str, Field] = {}
        for _ in range(header.u64()):
            key = header.string(LONGEST_TEXT).decode()
            value = _read(header, header.u32())
            if key.startswith("tokenizer."):
                fields[key] = value
    return fields


def _read(header: HeaderReader, kind: int) -> Any:
    if kind == STRING:
        return header.string(LONGEST_TEXT).decode()
    if kind == ARRAY:
        of, count = header.u32(), header.u64()
        return [_read(header, of) for _ in range(count)]
    raw = header.take(FIXED_BYTES[kind])
    return struct.unpack(FORMATS.get(kind, f"<{len(raw)}s"), raw)[0]


def write_model(shape: ModelShape, vocabulary: Mapping[str, Field], path: Path) -> None:
    """Each weight matrix is a section of the same random values."""
    tokens = vocabulary["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    shapes = shape.tensors(len(tokens))
    chance = np.random.default_rng(0)
    few = (chance.standard_normal(RANDOM_VALUES, np.float32) * SCALE).astype(np.float16)
    largest = max(int(np.prod(each)) for each in shapes.values())
    values = np.tile(few, largest // RANDOM_VALUES + 2)

    def weights(size: tuple[int, ...]) -> Tensor:
        if len(size) == 1:
            return np.ones(size, np.float32)
        start = int(chance.integers(RANDOM_VALUES))
        return values[start : start + int(np.prod(size))].reshape(size)

    tensors = [gguf_tensor(name, weights(size)) for name, size in shapes.items()]
    write_gguf(path, {**shape.metadata(len(tokens)), **vocabulary}, tensors)


def find_or_write(name: str, vocabulary: Path, folder: Path) -> Path:
    """The model in the folder, which is written unless an earlier run did so."""
    path = folder / f"random-{name}.gguf"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        started = time.perf_counter()
        partial = path.with_suffix(".partial")
        write_model(SHAPES[name], read_vocabulary(vocabulary), partial)
        partial.rename(path)
        took_s = time.perf_counter() - started
        print(f"wrote {path} ({path.stat().st_size / 1e9:.1f} GB) in {took_s:.0f} s", flush=True)
    return path


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    write_gguf(Path(sys.argv[2]), read_vocabulary(Path(sys.argv[1])), [])
