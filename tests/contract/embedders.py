"""Lists every embedder that has to fulfil the contract."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import gguf

from rekindle.engine.base import Embedder, EngineOptions
from rekindle.engine.llamacpp.embedder import LlamaCppEmbedder
from tests.support.tiny import write_llama
from tests.support.tiny_bert import write_bert

WRITERS: dict[str, Callable[[Path], Path]] = {
    "numpy-bert": write_bert,
    "llama.cpp-bert": partial(write_bert, quantised=True),
    "llama.cpp-decoder": partial(write_llama, context=256, pooling=gguf.PoolingType.LAST),
}


def build_embedder(name: str, folder: Path) -> Embedder:
    path = WRITERS[name](folder / f"{name}.gguf")
    return LlamaCppEmbedder(EngineOptions(path=path, threads=1))
