"""Engines are found by what a model file is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rekindle.engine.base import EngineOptions
from rekindle.engine.registry import ENGINES, known_engines, load_engine
from rekindle.errors import ConfigError, ModelError
from rekindle.protocol.requests import ENGINE_MODULE
from tests.support.numpy_engine import ENGINE, SUFFIX
from tests.support.numpy_engine.engine import NumpyEngine
from tests.support.numpy_engine.model import write_numpy
from tests.support.tiny import write_llama

OURS = "tests.support.numpy_engine"


def test_the_list_of_engines_loads_none_of_them() -> None:
    code = (
        "import sys; from rekindle.engine.registry import known_engines; known_engines();"
        "print([name for name in sys.modules if 'llamacpp' in name])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["tiny.gguf", "TINY.GGUF", "weights"])
def test_a_gguf_file_is_known_by_its_name_or_its_first_bytes(tmp_path: Path, name: str) -> None:
    path = write_llama(tmp_path / name)
    engine = load_engine(EngineOptions(path=path, parallel=1, threads=1, context_tokens=512))
    assert engine.capabilities.context_tokens == 512
    engine.close()


def test_a_damaged_file_is_refused_by_the_engine_of_its_kind(tmp_path: Path) -> None:
    path = tmp_path / "page.gguf"
    path.write_text("<html>")
    with pytest.raises(ModelError, match=r"page\.gguf: the file is damaged"):
        load_engine(EngineOptions(path=path))


@pytest.mark.parametrize("exists", [True, False])
def test_an_unknown_kind_of_file_is_answered_with_the_known_ones(
    tmp_path: Path, exists: bool
) -> None:
    path = tmp_path / "model.safetensors"
    if exists:
        path.write_bytes(b"")
    with pytest.raises(ModelError, match=r"no engine loads model\.safetensors; .*GGUF \(llama"):
        load_engine(EngineOptions(path=path))


def test_an_engine_can_be_asked_for_by_name(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"")
    with pytest.raises(ModelError, match=r"llama\.cpp cannot load"):
        load_engine(EngineOptions(path=path), name="llama.cpp")
    with pytest.raises(ModelError, match="no engine called quartz"):
        load_engine(EngineOptions(path=path), name="quartz")


def test_an_engine_from_outside_is_found_through_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_numpy(tmp_path / f"tiny{SUFFIX}")
    with pytest.raises(ModelError, match="no engine loads"):
        load_engine(EngineOptions(path=path))
    monkeypatch.setenv(ENGINE_MODULE, OURS)
    assert known_engines() == (ENGINE, *ENGINES)
    fractions: list[float] = []
    assert isinstance(load_engine(EngineOptions(path=path), fractions.append), NumpyEngine)
    assert fractions == [1.0]


@pytest.mark.parametrize("module", ["no.such.module", "json", "tests.contract.engines"])
def test_a_module_that_is_no_engine_is_a_wrong_setting(module: str) -> None:
    with pytest.raises(ConfigError, match=f"{ENGINE_MODULE} names {module}"):
        known_engines({ENGINE_MODULE: module})
