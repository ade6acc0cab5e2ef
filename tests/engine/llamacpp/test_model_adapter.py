"""A LoRA adapter changes what a GGUF model computes, and the fingerprint of its state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rekindle.engine.base import EngineOptions
from rekindle.engine.llamacpp.engine import LlamaCppEngine
from rekindle.errors import ModelError
from tests.contract.actions import prefill
from tests.support.tiny import write_adapter, write_llama

PROMPT = list(range(10, 30))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("adapters")
    write_llama(path / "base.gguf")
    for seed, name in enumerate(("poet", "lawyer")):
        write_adapter(path / f"{name}.gguf", seed=seed + 1)
    write_adapter(path / "wide.gguf", width=128)
    (path / "damaged.gguf").write_bytes((path / "poet.gguf").read_bytes()[:300])
    return path


def options(folder: Path, adapter: str | None) -> EngineOptions:
    file = folder / f"{adapter}.gguf" if adapter else None
    return EngineOptions(
        path=folder / "base.gguf", adapter=file, parallel=2, threads=1, context_tokens=256
    )


def look(folder: Path, adapter: str | None) -> tuple[bytes, list[np.ndarray[Any, Any]]]:
    """Return the fingerprint, and the logits of a shared and of an exact sequence."""
    engine = LlamaCppEngine(options(folder, adapter))
    try:
        rows: list[np.ndarray[Any, Any]] = []
        engine.observe = lambda _sequence, row: rows.append(row.copy())
        for exact in (False, True):
            prefill(engine, engine.sequences.open(exact=exact), PROMPT)
        return engine.capabilities.kv_layout.fingerprint, rows
    finally:
        engine.close()


def test_every_adapter_computes_something_else_in_every_context(folder: Path) -> None:
    found = {name: look(folder, name) for name in (None, "poet", "lawyer")}
    assert len({fingerprint for fingerprint, _ in found.values()}) == 3
    for place in range(2):
        plain, poet, lawyer = (rows[place] for _, rows in found.values())
        assert not np.allclose(plain, poet, atol=0.01)
        assert not np.allclose(poet, lawyer, atol=0.01)


def test_the_same_adapter_gives_the_same_bits(folder: Path) -> None:
    (fingerprint, rows), (again, others) = look(folder, "poet"), look(folder, "poet")
    assert fingerprint == again
    assert all(np.array_equal(*pair) for pair in zip(rows, others, strict=True))


@pytest.mark.parametrize("adapter", ["wide", "damaged", "base", "absent"])
def test_an_adapter_that_does_not_fit_is_refused(folder: Path, adapter: str) -> None:
    with pytest.raises(ModelError, match="cannot load the adapter"):
        LlamaCppEngine(options(folder, adapter))
