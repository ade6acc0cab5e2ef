"""Pools of other KV types are built on demand, and closed when idle."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rekindle.engine.base import EngineOptions
from rekindle.engine.llamacpp import sizes
from rekindle.engine.llamacpp.engine import LlamaCppEngine
from rekindle.errors import NoMemory
from tests.contract.actions import PROMPT, cold, prefill
from tests.contract.engines import write_wide_llama
from tests.support.tiny import write_llama, write_mamba


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[LlamaCppEngine]:
    path = write_wide_llama(tmp_path / "wide.gguf")
    built = LlamaCppEngine(EngineOptions(path=path, parallel=2, threads=1, context_tokens=1024))
    yield built
    built.close()


def test_a_pool_is_built_when_its_type_is_first_needed(engine: LlamaCppEngine) -> None:
    assert list(engine._pools) == ["f16"]
    assert engine.sequences.free_tokens("q8_0") == engine.sequences.free_tokens()
    sequence = engine.sequences.open(exact=False, kv_type="q8_0")
    prefill(engine, sequence, PROMPT[:10])
    assert list(engine._pools) == ["f16", "q8_0"]
    assert engine.sequences.free_tokens("q8_0") == engine.sequences.free_tokens() - 10


def test_a_pool_that_stays_empty_is_closed(engine: LlamaCppEngine) -> None:
    busy = engine.sequences.open(exact=False, kv_type="q4_0")
    cold(engine, PROMPT, exact=False, kv_type="q8_0")
    found = []
    for _ in range(2):
        engine.sequences.release_idle()
        found.append(list(engine._pools))
    assert found == [["f16", "q4_0", "q8_0"], ["f16", "q4_0"]]
    engine.sequences.close(busy)
    assert cold(engine, PROMPT, exact=False, kv_type="q8_0")


def test_a_pool_without_memory_is_refused_and_others_keep_working(
    engine: LlamaCppEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = cold(engine, PROMPT, exact=False)
    with monkeypatch.context() as patch:
        patch.setattr(sizes, "host_free_bytes", lambda: 1000)
        with pytest.raises(NoMemory, match=r"MB .*kv_bits.*--max-model-len"):
            engine.sequences.open(exact=False, kv_type="q8_0")
    with monkeypatch.context() as patch:
        patch.setattr(engine._pools._library, "llama_init_from_model", lambda _m, _p: None)
        with pytest.raises(NoMemory, match="kv_bits"):
            engine.sequences.open(exact=False, kv_type="q8_0")
    assert cold(engine, PROMPT, exact=False) == expected
    assert cold(engine, PROMPT, exact=False, kv_type="q8_0")


def test_pools_of_other_types_share_what_the_default_pool_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here nothing is left, so there is room for one of them at a time."""
    free_bytes = 1 << 34
    monkeypatch.setattr(sizes, "host_free_bytes", lambda: free_bytes)
    path = write_wide_llama(tmp_path / "wide.gguf")
    options = EngineOptions(path=path, threads=1, context_tokens=1024, kv_fraction=1e-9)
    engine = LlamaCppEngine(options)
    first = engine.sequences.open(exact=False, kv_type="q8_0")
    assert engine.sequences.free_tokens("q8_0") == 1024
    with pytest.raises(NoMemory, match="kv_bits"):
        engine.sequences.open(exact=False, kv_type="q4_0")
    engine.sequences.close(first)
    assert cold(engine, PROMPT, exact=False, kv_type="q4_0")
    assert list(engine._pools) == ["f16", "q4_0"]
    engine.close()


def test_a_reset_leaves_only_the_default_pool(engine: LlamaCppEngine) -> None:
    engine.sequences.open(exact=False, kv_type="q8_0")
    engine.sequences.reset()
    assert list(engine._pools) == ["f16"]
    assert cold(engine, PROMPT, exact=False, kv_type="q8_0")


@pytest.mark.parametrize("write", [write_llama, write_mamba])
def test_a_model_whose_heads_do_not_fit_has_one_type(tmp_path: Path, write: object) -> None:
    assert callable(write)
    engine = LlamaCppEngine(EngineOptions(path=write(tmp_path / "model.gguf"), threads=1))
    assert list(engine.capabilities.kv) == ["f16"]
    engine.close()
