"""Which files a server loads its models from."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import save_file

from rekindle.api.base.models import served_names
from rekindle.config import Config
from rekindle.errors import ConfigError, ModelError
from rekindle.front import launch
from rekindle.protocol.requests import LoadModel
from tests.models.tiny import write_gguf


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "eyes.gguf")


def fetched(model: Path, **settings: Any) -> launch.ModelFiles:
    config = Config(model=(str(model),), models_dir=model.parent / "models", **settings)
    launch.check_settings(config)
    [files] = launch.fetch(config, Console(file=io.StringIO())).values()
    assert files.path == model
    return files


def projector(model: Path, **settings: Any) -> Path | None:
    return fetched(model, **settings).mmproj


def test_a_projector_beside_the_model_is_loaded_with_it_unless_it_is_not_wanted(
    model: Path,
) -> None:
    beside = write_gguf(model.with_name("mmproj-f16.gguf"))
    assert projector(model) == projector(model, vlm=True) == beside
    assert projector(model, vlm=False) is None


def test_a_model_without_a_projector_reads_text_and_does_not_start_with_vlm(model: Path) -> None:
    assert projector(model) is None
    with pytest.raises(ModelError, match=r"eyes\.gguf has no projector"):
        projector(model, vlm=True)


def test_a_projector_can_be_named(model: Path, tmp_path: Path) -> None:
    write_gguf(model.with_name("mmproj-f16.gguf"))
    other = write_gguf(tmp_path / "other.gguf")
    assert projector(model, mmproj=other) == other
    with pytest.raises(ModelError, match="no model file at"):
        projector(model, mmproj=tmp_path / "none.gguf")


def test_only_a_projector_that_was_asked_for_has_to_be_usable(model: Path) -> None:
    beside = write_gguf(model.with_name("mmproj-f16.gguf"))
    assert not fetched(model).requires_vision
    assert fetched(model, vlm=True).requires_vision
    assert fetched(model, mmproj=beside).requires_vision
    for own in (fetched(model), fetched(model, vlm=True)):
        assert launch._load(own, Config()).requires_vision == own.requires_vision


def test_a_projector_is_of_one_model(model: Path) -> None:
    config = Config(model=(str(model), "smollm2"), mmproj=model)
    with pytest.raises(ConfigError, match="the projector of one model"):
        launch.check_settings(config)


def test_a_folder_of_pictures_has_to_be_there(tmp_path: Path) -> None:
    launch.check_settings(Config(media_folder=(tmp_path,)))
    with pytest.raises(ConfigError, match="--media-folder`: there is no folder"):
        launch.check_settings(Config(media_folder=(tmp_path, tmp_path / "none")))


def test_a_model_that_sees_and_the_same_that_does_not_share_the_disk_budget(
    monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    files = {"text": launch.ModelFiles(model), "eyes": launch.ModelFiles(model, model)}
    loads: list[LoadModel] = []
    monkeypatch.setattr(launch, "RuntimeClient", lambda _name, load, **_options: loads.append(load))
    for name in files:
        launch._runtime(name, Config(), files)
    assert [load.files for load in loads] == loads[0].served == loads[1].served
    assert len(set(loads[0].served)) == 2


# -- models that are folders ---------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "tiny-4bit"
    path.mkdir()
    (path / "config.json").write_text("{}")
    save_file({"a": np.zeros(2, np.float32)}, path / "model.safetensors")
    return path


def test_a_folder_is_served_under_its_own_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list(served_names(Config(model=(str(folder),)))) == ["tiny-4bit"]
    monkeypatch.chdir(folder)
    assert list(served_names(Config(model=(".",)))) == ["tiny-4bit"]


def test_a_folder_has_no_projector(folder: Path) -> None:
    write_gguf(folder.with_name("mmproj-f16.gguf"))  # of another model
    assert fetched(folder) == launch.ModelFiles(folder)
    for setting in ({"vlm": True}, {"mmproj": folder}):
        with pytest.raises(ModelError, match="is a folder, and those serve text alone"):
            fetched(folder, **setting)


def test_an_adapter_goes_with_its_model_and_makes_it_another_one(
    folder: Path, model: Path, tmp_path: Path
) -> None:
    adapter = tmp_path / "lora"
    adapter.mkdir()
    for path in (folder, model):
        plain, adapted = fetched(path), fetched(path, adapter=adapter)
        loads = [launch._load(own, Config()) for own in (plain, adapted)]
        assert [load.adapter for load in loads] == [None, str(adapter)]
        assert loads[0].files != loads[1].files


def test_an_adapter_is_of_one_model_and_has_to_be_there(folder: Path, tmp_path: Path) -> None:
    for models in ((), (str(folder), "smollm2")):
        with pytest.raises(ConfigError, match="is of one model"):
            launch.check_settings(Config(model=models, adapter=tmp_path))
    with pytest.raises(ConfigError, match="--adapter`: there is no folder"):
        launch.check_settings(Config(model=(str(folder),), adapter=tmp_path / "none"))


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({}, "smollm2"),
        ({"vlm": True}, "smollm2-shapes"),
        ({"vlm": True, "mmproj": Path("/x.gguf")}, "smollm2"),
        ({"vlm": True, "model": ("smollm2",)}, "smollm2"),
    ],
)
def test_the_default_model_sees_if_it_has_to(settings: dict[str, Any], name: str) -> None:
    assert list(served_names(Config(**settings))) == [name]
