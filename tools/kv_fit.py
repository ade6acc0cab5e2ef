"""Prints how many tokens of state fit into a GPU's memory, which is the table of docs/gpu.md.

`python tools/kv_fit.py --kv-fraction 0.4 --park-fraction 0.2 --kv-bits 8 --gpus 12,24`. All numbers
are computed from the shapes of the models. Nothing is measured.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from rekindle.engine.llamacpp.sizes import PARK_FRACTION
from rekindle.protocol.settings import RuntimeSettings

GIB = 1 << 30
WEIGHT_BITS = 4.9  # average bits per weight in Q4_K_M
DRIVER_BYTES = GIB // 2  # for the driver and its libraries
WORK_BYTES = 3 * GIB // 4  # to compute a batch, in addition to weights and state
MASK_BYTES = 2 * 2048  # per cell of the pool, for the attention mask of a batch
CELL_BITS = {16: 16.0, 8: 8.5, 4: 4.5}  # including the scale of each group of 32 values


@dataclass(frozen=True, slots=True)
class Shape:
    parameters: float
    layers: int
    kv_heads: int
    head_width: int = 128

    @property
    def weights_bytes(self) -> int:
        return int(self.parameters * WEIGHT_BITS / 8)

    def token_bytes(self, kv_bits: int) -> float:
        """Bytes of keys and values of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_width * CELL_BITS[kv_bits] / 8


MODELS = {
    "Llama 3.2 3B": Shape(3.21e9, 28, 8),
    "Qwen3 4B": Shape(4.02e9, 36, 8),
    "Llama 3.1 8B": Shape(8.03e9, 32, 8),
    "Qwen3 8B": Shape(8.19e9, 36, 8),
    "Qwen3 14B": Shape(14.8e9, 40, 8),
    "Qwen3 30B-A3B": Shape(30.5e9, 48, 4),
    "Qwen3 32B": Shape(32.8e9, 64, 8),
    "Llama 3.3 70B": Shape(70.6e9, 80, 8),
}


@dataclass(frozen=True, slots=True)
class Fit:
    """Number of tokens whose state fits on the device."""

    pool: int
    parked: int


def fit(
    shape: Shape, gpu_bytes: int, kv_fraction: float, park_fraction: float, kv_bits: int
) -> Fit | None:
    """How many tokens fit, or None if there is too little memory to compute."""
    free_bytes = gpu_bytes - DRIVER_BYTES - shape.weights_bytes
    each = shape.token_bytes(kv_bits)
    pool, parked = (int(share * free_bytes / each) for share in (kv_fraction, park_fraction))
    rest_bytes = free_bytes * (1 - kv_fraction - park_fraction)
    return Fit(pool, parked) if rest_bytes >= WORK_BYTES + pool * MASK_BYTES else None


def table(gpus: list[int], kv_fraction: float, park_fraction: float, kv_bits: int) -> list[str]:
    sizes = " | ".join(f"{each} GB" for each in gpus)
    lines = [
        f"| model | weights | state of 1,000 tokens | {sizes} |",
        "|---" * (3 + len(gpus)) + "|",
    ]
    for name, shape in MODELS.items():
        cells = [
            _cell(fit(shape, each * GIB, kv_fraction, park_fraction, kv_bits)) for each in gpus
        ]
        sizes = f"{shape.weights_bytes / 1e9:.1f} GB | {shape.token_bytes(kv_bits) / 1e3:.0f} MB"
        lines.append(f"| {name} | {sizes} | {' | '.join(cells)} |")
    return lines


def _cell(found: Fit | None) -> str:
    return f"{_short(found.pool)} + {_short(found.parked)}" if found else "-"


def _short(tokens: int) -> str:
    return f"{tokens / 1000:.0f}k" if tokens >= 10_000 else f"{tokens / 1000:.1f}k"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kv-fraction", type=float, default=RuntimeSettings().kv_fraction)
    parser.add_argument("--park-fraction", type=float, default=PARK_FRACTION)
    parser.add_argument("--kv-bits", type=int, choices=sorted(CELL_BITS), default=16)
    parser.add_argument("--gpus", default="8,16,24,80", help="memory of GPUs in GB")
    options = parser.parse_args()
    gpus = [int(size) for size in options.gpus.split(",")]
    rows = table(gpus, options.kv_fraction, options.park_fraction, options.kv_bits)
    print("\n".join(rows))


if __name__ == "__main__":
    main()
