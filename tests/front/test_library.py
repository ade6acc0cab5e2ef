"""How the library finds the files of a model and estimates its memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rekindle.api.base.specs import ModelSpec
from rekindle.config import Config
from rekindle.front.library import PROCESS_BYTES, ModelLibrary, budgeted, find_files, weights_bytes
from rekindle.models.progress import progress_on
from rekindle.protocol.requests import LoadModel
from rekindle.worker.pool import ModelPool, PreparedLoad
from tests.support.tiny import write_adapter, write_llama


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "one.gguf")


def prepared(model: Path, spec: ModelSpec, **settings: Any) -> PreparedLoad:
    pool = ModelPool()
    library = ModelLibrary(Config(models_dir=model.parent / "models", **settings), pool, {})
    runtime = library.offer(spec)
    return pool.model(runtime).policy.prepare()


def test_a_limit_sizes_the_caches_and_the_estimate_counts_them(model: Path) -> None:
    spec = ModelSpec(name="one", source=str(model))
    limit, weights = 1_000_000_000, model.stat().st_size
    found = prepared(model, spec, max_memory=limit)
    spare = limit - weights - PROCESS_BYTES
    assert found.load.memory_bytes == spare // 2
    assert found.load.settings.ram_cache == spare // 8
    cache_bytes = int(0.3 * (spare // 2)) + spare // 8
    assert found.estimate_bytes == weights + PROCESS_BYTES + cache_bytes
    assert 2 * found.estimate_bytes < limit
    own = prepared(model, spec, max_memory=limit, ram_cache=1 << 20)
    assert own.load.settings.ram_cache == 1 << 20


def test_without_a_limit_the_machine_decides(model: Path) -> None:
    load = prepared(model, ModelSpec(name="one", source=str(model))).load
    assert (load.memory_bytes, load.settings.ram_cache) == (None, None)


def test_an_adapter_and_a_created_model_have_state_of_their_own(model: Path) -> None:
    adapter = write_adapter(model.with_name("poet.gguf"))
    config = Config(models_dir=model.parent)
    specs = [
        ModelSpec(name="one", source=str(model)),
        ModelSpec(name="one:poet", source=str(model), adapter=adapter),
        ModelSpec(name="pirate", source=str(model), is_created=True, max_model_len=512),
    ]
    loads = [find_files(spec, config, progress_on(_console())) for spec in specs]
    assert len({load.files for load in loads}) == 3
    assert loads[2].settings.max_model_len == 512
    assert weights_bytes(loads[1]) == model.stat().st_size + adapter.stat().st_size
    pool = ModelPool()
    library = ModelLibrary(config, pool, {})
    runtimes = [library.offer(spec) for spec in specs]
    served = [pool.model(runtime).policy.prepare().load.served for runtime in runtimes]
    assert all({load.files for load in loads} == set(names) for names in served)


def test_an_embedding_model_has_no_kv_pool(model: Path) -> None:
    load = LoadModel(path=str(model), is_embedder=True, settings=Config().runtime)
    found = budgeted(load, 1_000_000_000)
    assert found.estimate_bytes == model.stat().st_size + PROCESS_BYTES


def _console() -> Any:
    import io

    from rich.console import Console

    return Console(file=io.StringIO())
