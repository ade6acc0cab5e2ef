"""The engine is chosen by the format of the model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rekindle.engine.base import EngineOptions
from rekindle.engine.registry import ENGINES, EngineKind, known_engines, load_engine
from rekindle.errors import ConfigError, ModelError
from rekindle.protocol.requests import ENGINE_MODULE
from tests.support.numpy_engine import ENGINE, SUFFIX
from tests.support.numpy_engine.engine import NumpyEngine
from tests.support.numpy_engine.model import write_numpy
from tests.support.tiny import write_llama

OURS = "tests.support.numpy_engine"


def test_listing_the_engines_imports_none_of_them() -> None:
    code = (
        "import sys; from rekindle.engine.registry import known_engines; known_engines();"
        "print([name for name in sys.modules if 'llamacpp' in name or 'mlx' in name])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["tiny.gguf", "TINY.GGUF", "weights"])
def test_a_gguf_file_is_recognised_by_its_name_or_its_first_bytes(
    tmp_path: Path, name: str
) -> None:
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
def test_an_unknown_format_is_refused_with_the_supported_ones(tmp_path: Path, exists: bool) -> None:
    path = tmp_path / "model.safetensors"
    if exists:
        path.write_bytes(b"")
    with pytest.raises(ModelError, match=r"loads model\.safetensors; .*GGUF \(llama.*MLX \(mlx"):
        load_engine(EngineOptions(path=path))


def test_an_engine_can_be_asked_for_by_name(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"")
    with pytest.raises(ModelError, match=r"llama\.cpp cannot load"):
        load_engine(EngineOptions(path=path), name="llama.cpp")
    with pytest.raises(ModelError, match="no engine is called quartz"):
        load_engine(EngineOptions(path=path), name="quartz")


def test_a_folder_with_settings_and_weights_is_an_mlx_model(tmp_path: Path) -> None:
    [mlx] = (kind for kind in ENGINES if kind.name == "mlx")
    folder = write_folder(tmp_path / "tiny")
    assert mlx.matches(folder)
    assert not mlx.matches(write_llama(tmp_path / "tiny.gguf"))


def test_an_engine_for_another_format_names_the_right_one(tmp_path: Path) -> None:
    folder, file = write_folder(tmp_path / "tiny"), write_llama(tmp_path / "tiny.gguf")
    with pytest.raises(ModelError, match=r"format MLX, which llama.cpp .*--engine mlx"):
        load_engine(EngineOptions(path=folder), name="llama.cpp")
    with pytest.raises(ModelError, match=r"format GGUF, which mlx .*--engine llama\.cpp"):
        load_engine(EngineOptions(path=file), name="mlx")


def test_an_engine_whose_packages_are_missing_says_which_to_install(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "tiny")
    code = (
        "import sys; from pathlib import Path; sys.modules['mlx_lm'] = None;"
        "from rekindle.engine.base import EngineOptions;"
        "from rekindle.engine.registry import load_engine;"
        f"load_engine(EngineOptions(path=Path({str(folder)!r})))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "MLX models need more packages" in ran.stderr
    assert "pip install 'rekindle[mlx]'" in ran.stderr


def test_an_engine_without_adapters_refuses_one(tmp_path: Path) -> None:
    kind = EngineKind("quartz", "QZ", Path.is_file, "quartz:Engine")
    with pytest.raises(ModelError, match=r"quartz takes no adapters: .*--adapter"):
        kind.load(EngineOptions(path=tmp_path, adapter=tmp_path), lambda _done: None)


def test_an_engine_without_embeddings_says_so(tmp_path: Path) -> None:
    kind = EngineKind("quartz", "QZ", Path.is_file, "quartz:Engine")
    with pytest.raises(ModelError, match="quartz computes no embeddings"):
        kind.load_embedder(EngineOptions(path=tmp_path), lambda _done: None)


def test_embeddings_of_a_folder_name_the_packages_that_are_missing(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "tiny")
    code = (
        "import sys; from pathlib import Path; sys.modules['mlx_lm'] = None;"
        "from rekindle.engine.base import EngineOptions;"
        "from rekindle.engine.registry import load_embedder;"
        f"load_embedder(EngineOptions(path=Path({str(folder)!r})))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "pip install 'rekindle[mlx]'" in ran.stderr


def write_folder(path: Path) -> Path:
    """Only the file names matter here."""
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"")
    return path


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
def test_a_module_without_an_engine_is_a_configuration_error(module: str) -> None:
    with pytest.raises(ConfigError, match=f"{ENGINE_MODULE} names {module}"):
        known_engines({ENGINE_MODULE: module})
