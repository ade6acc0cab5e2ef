"""Every engine the contract is held against."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rekindle.engine.base import Engine
from rekindle.engine.llamacpp.engine import LlamaCppEngine, LlamaCppOptions
from tests.support.fake import FakeEngine
from tests.support.tiny import write_gemma3, write_llama

ENGINES = ("fake", "llama", "gemma3")
WRITERS: dict[str, Callable[[Path], Path]] = {"llama": write_llama, "gemma3": write_gemma3}


def build(name: str, folder: Path) -> Engine:
    if name == "fake":
        return FakeEngine()
    path = WRITERS[name](folder / f"{name}.gguf")
    return LlamaCppEngine(LlamaCppOptions(path=path, parallel=4, threads=1))


every_engine = pytest.mark.parametrize("engine", ENGINES, indirect=True)
