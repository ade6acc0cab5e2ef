"""An MLX engine describes its model, and recovers from failures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from rekindle.engine.base import EngineOptions
from rekindle.engine.mlx import memory
from rekindle.engine.mlx.engine import MlxEngine
from rekindle.errors import CorruptBlock, EngineBroken
from tests.contract.actions import PROMPT, cold, prefill
from tests.support.tiny_mlx import write_tiny_mlx


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[MlxEngine]:
    path = write_tiny_mlx(tmp_path / "tiny")
    built = MlxEngine(EngineOptions(path=path, parallel=2, context_tokens=512))
    yield built
    built.close()


def test_capabilities_describe_the_model(engine: MlxEngine) -> None:
    about = engine.capabilities
    assert (about.architecture, about.quantization) == ("llama", "float32")
    assert about.parameters > 0


def test_on_an_nvidia_gpu_there_is_no_exact_mode_and_no_quantised_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured there: equal steps give other bits, and attention over quantised cells fails."""
    options = EngineOptions(
        path=write_tiny_mlx(tmp_path / "tiny", head_dim=64), parallel=2, context_tokens=512
    )
    elsewhere = MlxEngine(options)
    monkeypatch.setattr(memory, "is_cuda", lambda _device: True)
    there = MlxEngine(options)
    assert len(elsewhere.capabilities.kv) > 1
    assert list(there.capabilities.kv) == ["f32"]
    assert (elsewhere.capabilities.can_be_exact, there.capabilities.can_be_exact) == (True, False)
    elsewhere.close()
    there.close()


def test_after_a_failed_restore_the_engine_is_empty_and_works(
    engine: MlxEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = cold(engine, PROMPT, exact=False)
    source, into = (engine.sequences.open(exact=False) for _ in range(2))
    prefill(engine, source, PROMPT[:20])
    blob = engine.sequences.export(source, 0, 20)
    with pytest.raises(CorruptBlock):
        engine.sequences.restore(into, blob[:-1], 20)
    assert (source.length, into.length) == (20, 0)  # others go on after a damaged block

    def fail(*_arguments: Any) -> None:
        raise RuntimeError("[malloc] Unable to allocate 1 bytes.")

    with monkeypatch.context() as patch:
        patch.setattr(mx, "eval", fail)
        with pytest.raises(EngineBroken, match="allocate"):
            engine.sequences.restore(into, blob, 20)
    assert engine.sequences.free_tokens() == engine.capabilities.pool_tokens
    assert cold(engine, PROMPT, exact=False) == expected
