"""The type of the KV cells, and whether a model's heads fit it."""

from __future__ import annotations

from typing import Any

from rekindle.engine.llamacpp import bindings
from rekindle.errors import ModelError

GROUPS = {"f16": 1, "q8_0": 32}  # how many values share one scale


def check_kv_type(library: Any, model: int, kv_type: str) -> None:
    """A quantised head is a whole number of groups; llama.cpp would only say that it failed."""
    group = GROUPS[kv_type]
    for kind in ("key", "value"):
        width = _head_width(library, model, kind)
        if width is not None and width % group:
            raise ModelError(
                f"this model cannot have {kv_type} KV cells: its {kind} heads are {width} wide, "
                f"which is no multiple of {group}; leave --fp8-kvcache out"
            )


def _head_width(library: Any, model: int, kind: str) -> int | None:
    """As llama.cpp derives it from the model's metadata; None where there are no heads."""
    if width := _number(library, model, f"attention.{kind}_length"):
        return width
    heads = _number(library, model, "attention.head_count")
    return _number(library, model, "embedding_length") // heads if heads else None


def _number(library: Any, model: int, name: str) -> int:
    """A number of the architecture's own, 0 when the model does not say."""
    architecture = bindings.metadata(library, model, "general.architecture")
    value = bindings.metadata(library, model, f"{architecture}.{name}")
    return int(value) if value.isdecimal() else 0
