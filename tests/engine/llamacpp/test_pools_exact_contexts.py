"""Contexts of exact sequences are limited by the KV budget, and closed when idle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rekindle.engine.base import EngineOptions
from rekindle.engine.llamacpp import sizes
from rekindle.engine.llamacpp.engine import LlamaCppEngine
from rekindle.errors import NoMemory, PoolFull
from tests.contract.actions import PROMPT, cold
from tests.support.tiny import write_llama

CONTEXT_TOKENS = 1024
KV_FRACTION = 0.5


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("models") / "llama.gguf")


class Memory:
    """The free memory that the engine sees."""

    def __init__(self) -> None:
        self.free_bytes = 1 << 34


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    made = Memory()
    monkeypatch.setattr(sizes, "host_free_bytes", lambda: made.free_bytes)
    return made


Load = Callable[..., LlamaCppEngine]


@pytest.fixture
def load(path: Path) -> Iterator[Load]:
    loaded: list[LlamaCppEngine] = []

    def loader(**options: Any) -> LlamaCppEngine:
        options = {"parallel": 4, "threads": 1, "context_tokens": CONTEXT_TOKENS, **options}
        loaded.append(LlamaCppEngine(EngineOptions(path=path, **options)))
        return loaded[-1]

    yield loader
    for engine in loaded:
        engine.close()


def context_bytes(load: Load) -> int:
    engine = load()
    return CONTEXT_TOKENS * engine.capabilities.kv_layout.token_bytes


@pytest.mark.parametrize(("contexts", "expected"), [(1, 1), (2, 1), (4, 2), (5, 3), (90, 4)])
def test_exact_contexts_get_what_the_pool_leaves_and_at_least_one(
    memory: Memory, load: Load, contexts: int, expected: int
) -> None:
    """The pool takes up to two contexts, and `--parallel` limits the number."""
    memory.free_bytes = int(contexts * context_bytes(load) / KV_FRACTION) + 1
    known = load(kv_fraction=KV_FRACTION).capabilities
    assert known.pool_tokens == min(contexts, 2) * CONTEXT_TOKENS
    assert known.exact_sequences == expected


def test_a_context_is_built_on_demand_and_reused(memory: Memory, load: Load) -> None:
    engine = load()
    assert engine._exact.count == 0
    first = cold(engine, PROMPT)
    assert engine._exact.count == 1
    assert cold(engine, PROMPT) == first
    assert engine._exact.count == 1


def test_a_context_that_stays_idle_is_closed(memory: Memory, load: Load) -> None:
    engine = load()
    busy = engine.sequences.open(exact=True)
    cold(engine, PROMPT)
    counts = [engine._exact.count]
    for _ in range(2):
        engine.sequences.release_idle()
        counts.append(engine._exact.count)
    assert counts == [2, 2, 1]  # it was used since the call before: not at the first one
    engine.sequences.close(busy)
    assert cold(engine, PROMPT) == cold(engine, PROMPT)


def test_no_context_is_built_without_free_memory(memory: Memory, load: Load) -> None:
    engine = load()
    memory.free_bytes = context_bytes(load) - 1
    with pytest.raises(NoMemory, match=r"1 MB .*cache_exact.*--max-model-len"):
        engine.sequences.open(exact=True)
    memory.free_bytes = 1 << 34
    assert cold(engine, PROMPT) == cold(engine, PROMPT)


def test_a_failed_allocation_affects_one_sequence_only(
    memory: Memory, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load()
    expected = cold(engine, PROMPT)
    held = engine.sequences.open(exact=True)  # the idle one, so that the next has to be built
    with monkeypatch.context() as patch:
        patch.setattr(engine._exact._library, "llama_init_from_model", lambda _m, _p: None)
        with pytest.raises(NoMemory, match="cache_exact"):
            engine.sequences.open(exact=True)
    engine.sequences.close(held)
    assert cold(engine, PROMPT) == expected
    assert cold(engine, PROMPT, exact=False)


def test_open_contexts_are_limited_by_the_budget(memory: Memory, load: Load) -> None:
    memory.free_bytes = int(4 * context_bytes(load) / KV_FRACTION) + 1
    engine = load(kv_fraction=KV_FRACTION)
    """And one more, for what takes over the state of another."""
    for _ in range(3):
        engine.sequences.open(exact=True)
    with pytest.raises(PoolFull):
        engine.sequences.open(exact=True)
    assert engine._exact.count == 3


def test_a_reset_closes_every_exact_context(memory: Memory, load: Load) -> None:
    engine = load()
    engine.sequences.open(exact=True)
    cold(engine, PROMPT)
    engine.sequences.reset()
    assert engine._exact.count == 0
