"""The fingerprint of a state depends on everything that decides its bytes, and on nothing else."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rekindle.engine.base import EngineOptions
from rekindle.engine.llamacpp import bindings
from rekindle.engine.llamacpp.capabilities import (
    Numerics,
    library_files,
    state_fingerprint,
    weights_digest,
)
from rekindle.engine.llamacpp.engine import LlamaCppEngine
from tests.contract.actions import PROMPT, prefill
from tests.contract.engines import write_wide_llama
from tests.support.tiny import write_phi3

NUMERICS = Numerics(
    state_format="f", library=b"l", backends=("b",), gpu_layers=1, kv_type="f16", step_tokens=64
)
OTHER: dict[str, Any] = {  # another value for every field of Numerics
    "state_format": "g",
    "library": b"m",
    "backends": ("b", "c"),
    "gpu_layers": 2,
    "kv_type": "q8_0",
    "step_tokens": 128,
    "rope_factors": "long",
}

# Every setting of the engine: another value that changes what is computed, or one that must not.
NUMERIC: dict[str, Any] = {"path": "other.gguf", "context_tokens": 2048, "kv_type": "q8_0"}
NUMERIC_OF_PICTURES = ("mmproj",)  # see test_vision.py
NUMERIC_OF_ADAPTERS = ("adapter",)  # see test_model_adapter.py
NUMERIC_ON_SEVERAL_GPUS = ("gpus", "gpu_shares")  # see test_gpus.py
NUMERIC_ON_GPU: dict[str, Any] = {"gpu_layers": 1}
NOT_NUMERIC: dict[str, Any] = {
    "parallel": 7,
    "kv_fraction": 0.1,
    "memory_bytes": 1 << 20,
    "park_fraction": 0.01,
    "host_bytes": 1 << 20,
    "threads": 3,
}


# -- every setting is classified -----------------------------------------------------------------


def test_every_engine_setting_is_classified_as_numeric_or_not() -> None:
    """A new setting fails here until it is added to the right table, which other tests use."""
    on_gpus = [*NUMERIC_ON_GPU, *NUMERIC_ON_SEVERAL_GPUS]
    of_files = [*NUMERIC_OF_PICTURES, *NUMERIC_OF_ADAPTERS]
    classified = [*NUMERIC, *of_files, *on_gpus, *NOT_NUMERIC]
    assert sorted(classified) == sorted(field.name for field in fields(EngineOptions))


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> EngineOptions:
    folder = tmp_path_factory.mktemp("models")
    write_wide_llama(folder / "wide.gguf")
    write_phi3(folder / "other.gguf")
    return EngineOptions(path=folder / "wide.gguf", parallel=2, threads=1, context_tokens=512)


def look(options: EngineOptions) -> tuple[bytes, np.ndarray[Any, Any]]:
    """Return the fingerprint, and the logits after an exact prompt."""
    engine = LlamaCppEngine(options)
    try:
        rows: list[np.ndarray[Any, Any]] = []
        engine.observe = lambda _sequence, row: rows.append(row.copy())
        prefill(engine, engine.sequences.open(exact=True), PROMPT)
        return engine.capabilities.kv_layout.fingerprint, rows[-1]
    finally:
        engine.close()


@pytest.mark.parametrize("name", NUMERIC)
def test_a_setting_that_changes_numbers_changes_the_fingerprint(
    options: EngineOptions, name: str
) -> None:
    value: Any = options.path.with_name(NUMERIC[name]) if name == "path" else NUMERIC[name]
    base = replace(options, path=options.path.with_name("other.gguf"), context_tokens=512)
    base = base if name == "context_tokens" else options  # the length matters to LongRoPE alone
    (before, logits), (after, others) = look(base), look(replace(base, **{name: value}))
    assert before != after
    assert not np.array_equal(logits, others)


@pytest.mark.parametrize("name", [*NOT_NUMERIC, "context_tokens"])
def test_a_setting_that_keeps_the_fingerprint_changes_no_bit(
    options: EngineOptions, name: str
) -> None:
    value = {**NOT_NUMERIC, "context_tokens": 1500}[name]
    (before, logits), (after, others) = look(options), look(replace(options, **{name: value}))
    assert before == after
    assert np.array_equal(logits, others)


def test_the_fingerprint_includes_the_gpu_layers_up_to_their_number(
    options: EngineOptions,
) -> None:
    engine = LlamaCppEngine(options)
    model = engine._model
    try:
        on_cpu = [
            Numerics.of(model, replace(options, gpu_layers=n), 64, "f16") for n in (None, 0, 1)
        ]
        assert len(set(on_cpu)) == 1
        model.on_gpu = True
        some = [Numerics.of(model, replace(options, gpu_layers=n), 64, "f16") for n in (0, 1, 2)]
        assert len(set(some)) == 3
        every = [
            Numerics.of(model, replace(options, gpu_layers=n), 64, "f16") for n in (None, 3, 999)
        ]
        assert len(set(every)) == 1
    finally:
        model.on_gpu = False
        engine.close()


# -- and so is all that goes into the fingerprint ------------------------------------------------


@pytest.mark.parametrize("name", [field.name for field in fields(Numerics)])
def test_every_part_of_the_numerics_is_in_the_fingerprint(name: str) -> None:
    other = replace(NUMERICS, **{name: OTHER[name]})
    assert state_fingerprint(b"weights", NUMERICS) != state_fingerprint(b"weights", other)
    assert state_fingerprint(b"weights", NUMERICS) == state_fingerprint(
        b"weights", replace(NUMERICS)
    )


def write_split(folder: Path, *parts: bytes) -> Path:
    folder.mkdir()
    for number, part in enumerate(parts, start=1):
        (folder / f"m-{number:05}-of-{len(parts):05}.gguf").write_bytes(part)
    return folder / f"m-00001-of-{len(parts):05}.gguf"


def test_a_later_file_of_a_split_changes_the_fingerprint(tmp_path: Path) -> None:
    one = write_split(tmp_path / "one", b"metadata", b"weights")
    other = write_split(tmp_path / "other", b"metadata", b"tuned weights")
    same = write_split(tmp_path / "same", b"metadata", b"weights")
    assert weights_digest(one) == weights_digest(same)
    assert weights_digest(one) != weights_digest(other)


# -- the library ---------------------------------------------------------------------------------


def test_another_build_of_the_library_changes_the_fingerprint(
    options: EngineOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = LlamaCppEngine(options)
    try:
        pinned = Numerics.of(engine._model, options, 64, "f16")
        for name in ("one", "other"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "libllama.so").write_text(f"{name} build of llama.cpp")
        found = {pinned}
        for name in ("one", "other", "one"):
            monkeypatch.setenv("REKINDLE_LLAMA_LIB", str(tmp_path / name / "libllama.so"))
            found.add(Numerics.of(engine._model, options, 64, "f16"))
        assert len(found) == 3
    finally:
        engine.close()


def test_a_shared_build_includes_all_of_its_libraries(tmp_path: Path) -> None:
    """Its kernels are in files next to the named library."""
    for name in ("libllama.so.0", "libggml-base.so", "libggml-cuda.so", "README", "libpng.so"):
        (tmp_path / name).write_bytes(name.encode())
    (tmp_path / "libllama.so").symlink_to("libllama.so.0")
    found = [file.name for file in library_files(tmp_path / "libllama.so")]
    assert found == ["libggml-base.so", "libggml-cuda.so", "libllama.so.0"]


# -- what contexts and models are built with -----------------------------------------------------

# Parameters that are given to llama.cpp, and what stands for them in the fingerprint.
GIVEN = {
    "n_gpu_layers": "gpu_layers",
    "kv_overrides": "rope_factors",
    "type_k": "kv_type",
    "type_v": "kv_type",
    "flash_attn_type": "state_format",
    "kv_unified": "state_format",
    "yarn_orig_ctx": None,  # as in the model's file
    "progress_callback": None,
    "n_ctx": None,  # the rest is shown above to change no bit
    "n_batch": None,
    "n_ubatch": None,
    "n_seq_max": None,
    "n_outputs_max": None,
    "n_threads": None,
    "n_threads_batch": None,
}


class Recorder:
    """Records the names of all native parameters that differ from their default."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self.given: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def llama_model_load_from_file(self, path: bytes, params: Any) -> Any:
        self._note(params, self._library.llama_model_default_params())
        return self._library.llama_model_load_from_file(path, params)

    def llama_init_from_model(self, model: int, params: Any) -> Any:
        self._note(params, self._library.llama_context_default_params())
        return self._library.llama_init_from_model(model, params)

    def _note(self, params: Any, defaults: Any) -> None:
        names = [name for name, _ in params._fields_]
        self.given |= {name for name in names if getattr(params, name) != getattr(defaults, name)}


def test_every_native_parameter_is_classified(
    options: EngineOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new parameter fails here until its part of the fingerprint is named."""
    recorder = Recorder(bindings.load_library())
    monkeypatch.setattr(bindings, "load_library", lambda: recorder)
    for path, kv_type in ((options.path, "q8_0"), (options.path.with_name("other.gguf"), "f16")):
        LlamaCppEngine(replace(options, path=path, kv_type=kv_type)).close()
    assert recorder.given == set(GIVEN)
    assert {each for each in GIVEN.values() if each} < {field.name for field in fields(Numerics)}
