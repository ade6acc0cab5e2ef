"""All contexts of a LongRoPE model use the same rotation factors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rekindle.engine.base import EngineOptions, Work, run_step
from rekindle.engine.llamacpp.engine import LlamaCppEngine
from tests.contract.actions import GREEDY, PROMPT
from tests.support.tiny import write_llama, write_phi3

ORIGINAL_TOKENS = 1024  # of the tiny model: beyond it the long factors are right


@pytest.fixture(scope="module")
def phi3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "phi3.gguf"
    return write_phi3(path, original=ORIGINAL_TOKENS)


def load(path: Path, context_tokens: int | None) -> LlamaCppEngine:
    options = EngineOptions(path=path, parallel=2, threads=1, context_tokens=context_tokens)
    return LlamaCppEngine(options)


def with_engine(path: Path, context_tokens: int | None, read: Callable[[Any], Any]) -> Any:
    engine = load(path, context_tokens)
    try:
        return read(engine)
    finally:
        engine.close()


def logits(engine: LlamaCppEngine, *, exact: bool) -> np.ndarray[Any, Any]:
    """Return the logits after one step."""
    rows: list[np.ndarray[Any, Any]] = []
    engine.observe = lambda _sequence, row: rows.append(row.copy())
    sequence = engine.sequences.open(exact=exact)
    tokens = PROMPT[: engine.capabilities.step_tokens]
    run_step(engine, [Work(sequence, tokens, engine.sampler(GREEDY, tokens))])
    engine.sequences.close(sequence)
    return rows[0]


def fingerprint(engine: LlamaCppEngine) -> bytes:
    return engine.capabilities.kv_layout.fingerprint


@pytest.mark.parametrize("context_tokens", [ORIGINAL_TOKENS, 2 * ORIGINAL_TOKENS, None])
def test_pool_and_exact_contexts_use_the_same_rotation(
    phi3: Path, context_tokens: int | None
) -> None:
    """The pool has more cells than the context, so llama.cpp would choose other factors for it."""

    def both(engine: LlamaCppEngine) -> list[np.ndarray[Any, Any]]:
        assert engine.capabilities.pool_tokens > ORIGINAL_TOKENS
        return [logits(engine, exact=exact) for exact in (False, True)]

    shared, exact = with_engine(phi3, context_tokens, both)
    assert np.array_equal(shared, exact)


def test_context_lengths_with_the_same_factors_share_state_and_others_do_not(phi3: Path) -> None:
    lengths = (ORIGINAL_TOKENS // 2, ORIGINAL_TOKENS, 2 * ORIGINAL_TOKENS, None)
    half, original, twice, longest = (with_engine(phi3, each, fingerprint) for each in lengths)
    assert half == original
    assert twice == longest
    assert original != twice


def test_context_lengths_with_the_same_factors_give_the_same_logits(phi3: Path) -> None:
    lengths = (ORIGINAL_TOKENS // 2, ORIGINAL_TOKENS, 2 * ORIGINAL_TOKENS, None)
    half, original, twice, longest = (
        with_engine(phi3, each, partial(logits, exact=True)) for each in lengths
    )
    assert np.array_equal(half, original)
    assert np.array_equal(twice, longest)
    assert not np.array_equal(original, twice), "the factors of the tiny model make no difference"


def test_a_model_without_a_longer_context_uses_the_short_factors(
    phi3: Path, tmp_path: Path
) -> None:
    """Whatever the size of the pool, as with MiniCPM3, whose two lengths are equal."""
    trained = write_phi3(tmp_path / "short.gguf", context=ORIGINAL_TOKENS, original=ORIGINAL_TOKENS)
    short = with_engine(phi3, ORIGINAL_TOKENS, partial(logits, exact=True))
    for exact in (False, True):
        assert np.array_equal(with_engine(trained, None, partial(logits, exact=exact)), short)


def test_the_state_of_other_models_does_not_depend_on_the_context_length(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "llama.gguf")
    assert with_engine(path, 512, fingerprint) == with_engine(path, None, fingerprint)
