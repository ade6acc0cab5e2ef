"""How the settings decide which files a server loads its models from."""

from __future__ import annotations

import io
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import save_file

from rekindle.api.base.specs import ModelSpec, served_names
from rekindle.config import Config
from rekindle.errors import ConfigError, ModelError
from rekindle.front import launch, library
from rekindle.front.library import ModelLibrary
from rekindle.protocol.requests import LoadModel
from rekindle.protocol.settings import RuntimeSettings
from rekindle.worker.client import RuntimeClient
from rekindle.worker.pool import ModelPool
from tests.models.tiny import write_gguf


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "eyes.gguf")


def fetched(model: Path, **settings: Any) -> LoadModel:
    config = Config(model=(str(model),), models_dir=model.parent / "models", **settings)
    launch.check_settings(config)
    [load] = launch.fetch(config, Console(file=io.StringIO())).values()
    assert load.path == str(model)
    return load


def test_a_server_may_open_as_many_files_as_the_hard_limit_allows() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    lower = 1024
    allowed = min(before[1], launch.MAX_OPEN_FILES) if before[1] > 0 else launch.MAX_OPEN_FILES
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (lower, before[1]))
        launch.raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (max(lower, allowed), before[1])
        launch.raise_file_limit()  # changes nothing any more
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (max(lower, allowed), before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_proxy_in_front_of_an_open_server_needs_a_decision() -> None:
    """Whoever reaches the proxy reaches the server."""
    with pytest.raises(ConfigError, match="--api-key"):
        launch.check_settings(Config(allowed_host=("models.example",)))
    launch.check_settings(Config(allowed_host=("models.example",), api_key=("secret",)))
    launch.check_settings(Config(allowed_host=("models.example",), no_auth=True))


def projector(model: Path, **settings: Any) -> Path | None:
    found = fetched(model, **settings).mmproj
    return Path(found) if found else None


def test_a_projector_next_to_the_model_is_loaded_unless_disabled(
    model: Path,
) -> None:
    beside = write_gguf(model.with_name("mmproj-f16.gguf"))
    assert projector(model) == projector(model, vlm=True) == beside
    assert projector(model, vlm=False) is None


def test_a_model_without_a_projector_does_not_start_with_vlm(model: Path) -> None:
    assert projector(model) is None
    with pytest.raises(ModelError, match=r"eyes\.gguf has no projector"):
        projector(model, vlm=True)


def test_a_projector_can_be_named(model: Path, tmp_path: Path) -> None:
    write_gguf(model.with_name("mmproj-f16.gguf"))
    other = write_gguf(tmp_path / "other.gguf")
    assert projector(model, mmproj=other) == other
    with pytest.raises(ModelError, match="no model file at"):
        projector(model, mmproj=tmp_path / "none.gguf")


def test_only_a_requested_projector_has_to_work(model: Path) -> None:
    beside = write_gguf(model.with_name("mmproj-f16.gguf"))
    assert not fetched(model).requires_vision
    assert fetched(model, vlm=True).requires_vision
    assert fetched(model, mmproj=beside).requires_vision


def test_a_projector_needs_exactly_one_model(model: Path) -> None:
    config = Config(model=(str(model), "smollm2"), mmproj=model)
    with pytest.raises(ConfigError, match="the projector of one model"):
        launch.check_settings(config)


def test_a_missing_library_is_rejected_with_the_remedy(tmp_path: Path) -> None:
    library = tmp_path / "libmtmd.so"
    with pytest.raises(
        ConfigError, match=r"there is no file .*libmtmd\.so: run `rekindle build-gpu`"
    ):
        launch.check_settings(Config(llama_lib=library))
    library.touch()
    launch.check_settings(Config(llama_lib=library))


def test_a_missing_media_folder_is_rejected(tmp_path: Path) -> None:
    launch.check_settings(Config(media_folder=(tmp_path,)))
    with pytest.raises(ConfigError, match="--media-folder`: there is no folder"):
        launch.check_settings(Config(media_folder=(tmp_path, tmp_path / "none")))


def test_a_model_with_and_without_projector_share_the_disk_budget(
    monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    text = LoadModel(path=str(model), settings=RuntimeSettings())
    eyes = LoadModel(path=str(model), mmproj=str(model), settings=RuntimeSettings())
    loads: list[LoadModel] = []

    class Recorded(RuntimeClient):
        def __init__(self, name: str, load: LoadModel, **options: Any) -> None:
            super().__init__(name, load, **options)
            loads.append(load)

    monkeypatch.setattr(library, "RuntimeClient", Recorded)
    models = ModelLibrary(Config(), ModelPool(), {"text": text, "eyes": eyes})
    for name in ("text", "eyes"):
        models.offer(ModelSpec(name=name, source=str(model), at_start=True))
    assert [load.files for load in loads] == loads[0].served == loads[1].served
    assert len(set(loads[0].served)) == 2


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "tiny-4bit"
    path.mkdir()
    (path / "config.json").write_text("{}")
    save_file({"a": np.zeros(2, np.float32)}, path / "model.safetensors")
    return path


def test_a_model_folder_is_served_under_its_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list(served_names(Config(model=(str(folder),)))) == ["tiny-4bit"]
    monkeypatch.chdir(folder)
    assert list(served_names(Config(model=(".",)))) == ["tiny-4bit"]


def test_a_model_folder_without_a_vision_part_takes_no_images(folder: Path) -> None:
    write_gguf(folder.with_name("mmproj-f16.gguf"))  # of another model
    assert (fetched(folder).mmproj, fetched(folder).adapter) == (None, None)
    with pytest.raises(ModelError, match=r"no vision part .* Omit --vlm"):
        fetched(folder, vlm=True)
    with pytest.raises(ModelError, match="Give --vlm in place of --mmproj"):
        fetched(folder, mmproj=folder)


def test_a_model_folder_with_a_vision_part_is_its_own_projector(folder: Path) -> None:
    (folder / "config.json").write_text('{"vision_config": {"hidden_size": 8}}')
    for setting, required in ({}, False), ({"vlm": True}, True):
        assert fetched(folder, **setting).mmproj == str(folder)
        assert fetched(folder, **setting).requires_vision is required
    assert fetched(folder, vlm=False).mmproj is None
    assert fetched(folder, adapter=(str(folder),)).mmproj is None  # adapters are for text
    assert fetched(folder, adapter=(str(folder),), vlm=True).mmproj == str(folder)


def test_an_adapter_makes_a_different_model(folder: Path, model: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "lora"
    adapter.mkdir()
    for path in (folder, model):
        plain, adapted = fetched(path), fetched(path, adapter=(str(adapter),))
        assert (plain.adapter, adapted.adapter) == (None, str(adapter))
        assert plain.files != adapted.files


def test_an_adapter_needs_one_model_and_an_existing_folder(folder: Path, tmp_path: Path) -> None:
    for models in ((), (str(folder), "smollm2")):
        with pytest.raises(ConfigError, match="is for one model"):
            launch.check_settings(Config(model=models, adapter=(str(tmp_path),)))
    with pytest.raises(ConfigError, match="--adapter`: there is no file or folder"):
        launch.check_settings(Config(model=(str(folder),), adapter=(str(tmp_path / "none"),)))


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({}, "smollm2"),
        ({"vlm": True}, "smollm2-shapes"),
        ({"vlm": True, "mmproj": Path("/x.gguf")}, "smollm2"),
        ({"vlm": True, "model": ("smollm2",)}, "smollm2"),
    ],
)
def test_vlm_selects_a_default_model_with_vision(settings: dict[str, Any], name: str) -> None:
    assert list(served_names(Config(**settings))) == [name]
