"""LongRoPE: which of a model's two sets of rotation factors is used, the same in every context.

llama.cpp compares each context's cells with the model's original context length. A pool has more
cells than an exact context, and how many depends on free memory, so that the two could rotate
differently, and one run unlike the next. Here the settings and the model decide, once.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rekindle.engine.base import EngineOptions
from rekindle.engine.llamacpp import bindings
from rekindle.engine.llamacpp.gguf_header import open_header
from rekindle.models.quant import split_names

LONG_FACTORS = "rope_factors_long.weight"


@dataclass(frozen=True, slots=True)
class RopeChoice:
    key: str  # of the model's original context length
    original_tokens: int
    factors: Literal["long", "short"]

    @property
    def overrides(self) -> Any:
        """An original context length that is below that of any context, or above."""
        forced = 1 if self.factors == "long" else (1 << 31) - 1
        override = bindings.KvOverride(bindings.OVERRIDE_INT, self.key.encode())
        override.value.number = forced
        return (bindings.KvOverride * 2)(override, bindings.KvOverride())  # the empty one ends it


def choose_rope(library: Any, options: EngineOptions) -> RopeChoice | None:
    """None for a model with one set of factors, and for a file that llama.cpp cannot read."""
    files = [options.path.with_name(name) for name in split_names(options.path.name)]
    if not any(_has_long_factors(library, file) for file in files):
        return None
    with open_header(library, files[0]) as header:
        architecture = header.text("general.architecture")
        key = f"{architecture}.rope.scaling.original_context_length"
        trained_tokens = header.number(f"{architecture}.context_length")
        original_tokens = header.number(key) or trained_tokens
    wanted_tokens = options.context_tokens or trained_tokens
    factors: Literal["long", "short"] = "long" if wanted_tokens > original_tokens else "short"
    return RopeChoice(key, original_tokens, factors)


def _has_long_factors(library: Any, file: Path) -> bool:
    with open_header(library, file) as header:
        return header.has_tensor(LONG_FACTORS)
