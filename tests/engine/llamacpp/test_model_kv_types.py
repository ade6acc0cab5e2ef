"""8-bit KV cells need less memory, another fingerprint, and heads of a suitable width."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rekindle.engine.base import EngineOptions
from rekindle.engine.llamacpp.engine import LlamaCppEngine
from rekindle.errors import ModelError
from tests.contract.engines import write_wide_llama
from tests.support.tiny import write_gemma3, write_llama


def measure(path: Path, kv_type: str) -> tuple[int, bytes]:
    """Return the bytes of one more token, and the fingerprint."""
    engine = LlamaCppEngine(EngineOptions(path=path, threads=1, kv_type=kv_type))
    try:
        return engine.capabilities.kv_layout.token_bytes, engine.capabilities.kv_layout.fingerprint
    finally:
        engine.close()


def test_8_bit_cells_take_half_the_memory_and_have_another_fingerprint(tmp_path: Path) -> None:
    path = write_wide_llama(tmp_path / "wide.gguf")
    (full, full_print), (small, small_print) = (measure(path, kind) for kind in ("f16", "q8_0"))
    assert full / 2 < small < 0.6 * full  # 34 bytes for 32 values instead of 64, and positions
    assert full_print != small_print


@pytest.mark.parametrize("write", [write_llama, write_gemma3])
def test_heads_that_are_not_whole_groups_are_refused(
    tmp_path: Path, write: Callable[[Path], Path]
) -> None:
    path = write(tmp_path / "narrow.gguf")
    with pytest.raises(ModelError, match=r"key heads, 16, is not a multiple of 32"):
        LlamaCppEngine(EngineOptions(path=path, threads=1, kv_type="q8_0"))
