"""Lists every embedder that has to fulfil the contract."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import gguf

from rekindle.engine.base import Embedder, EngineOptions
from rekindle.engine.registry import load_embedder
from tests.support.tiny import write_llama
from tests.support.tiny_bert import write_bert
from tests.support.tiny_text_models import write_decoder, write_encoder

WRITERS: dict[str, Callable[[Path], Path]] = {
    "numpy-bert": write_bert,
    "llama.cpp-bert": partial(write_bert, quantised=True),
    "llama.cpp-decoder": partial(write_llama, context=256, pooling=gguf.PoolingType.LAST),
    "mlx-bert": write_encoder,
    "mlx-xlm-roberta": partial(write_encoder, kind="xlm-roberta"),
    "mlx-decoder": write_decoder,
}


def build_embedder(name: str, folder: Path) -> Embedder:
    path = WRITERS[name](folder / (name if name.startswith("mlx") else f"{name}.gguf"))
    return load_embedder(EngineOptions(path=path, threads=1))
