"""The models that the settings offer: their names, order, kinds and sources."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rekindle.api.base.specs import ModelSpec, kind_of, model_specs
from rekindle.config import Config, load_config
from rekindle.errors import ConfigError
from rekindle.front import launch
from rekindle.models.created import write_created
from tests.support.tiny import write_adapter, write_llama


def config_of(folder: Path, text: str = "", **flags: Any) -> Config:
    file = folder / "rekindle.yaml"
    file.write_text(text)
    return load_config(flags, {}, file)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("b", "a"):
        write_llama(tmp_path / f"{name}.gguf")
    write_llama(tmp_path / "vectors.gguf", pooling=1)
    write_llama(tmp_path / "rank.gguf", pooling=4)
    write_adapter(tmp_path / "poet.gguf")
    return tmp_path


def test_models_have_the_order_of_the_settings(folder: Path) -> None:
    text = f"""
models:
  zebra: {folder}/a.gguf
  ant: {{model: {folder}/b.gguf, keep_loaded: true, adapters: {{poet: {folder}/poet.gguf}}}}
"""
    specs = model_specs(config_of(folder, text, model=["smollm2"], idle_unload="15m"))
    assert list(specs) == ["smollm2", "zebra", "ant", "ant:poet"]
    assert [spec.at_start for spec in specs.values()] == [True, False, True, False]
    assert specs["ant"].keep_loaded
    assert not specs["ant:poet"].keep_loaded
    assert specs["ant:poet"].adapter == folder / "poet.gguf"
    assert specs["zebra"].idle_unload_s == 900.0


def test_without_model_flags_nothing_but_the_declared_models_is_served(folder: Path) -> None:
    specs = model_specs(config_of(folder, f"models: {{one: {folder}/a.gguf}}"))
    assert list(specs) == ["one"]
    assert list(model_specs(Config())) == ["smollm2"]


def test_the_flag_offers_every_model_of_a_folder_but_no_adapter(folder: Path) -> None:
    specs = model_specs(config_of(folder, models_dir=str(folder)))
    assert {name: spec.kind for name, spec in specs.items()} == {
        "a": "text",
        "b": "text",
        "rank": "rerank",
        "vectors": "embedding",
    }
    by_file = model_specs(config_of(folder, f"models_dir: {folder}"))
    assert list(by_file) == ["smollm2"], "the setting in a file only names the folder"


def test_adapters_of_one_model_are_models_of_their_own(folder: Path) -> None:
    poet = folder / "poet.gguf"
    config = config_of(
        folder, model=[str(folder / "a.gguf")], adapter=[f"second={poet}", str(poet)]
    )
    launch.check_settings(config)
    specs = model_specs(config)
    assert list(specs) == ["a", "a:second", "a:poet"]
    assert specs["a:poet"] == ModelSpec(name="a:poet", source=str(folder / "a.gguf"), adapter=poet)


def test_created_models_are_found_again(folder: Path) -> None:
    write_created(folder, "team/pirate:v1", {"from": str(folder / "a.gguf"), "system": "Arr"})
    (folder / "created" / "broken.json").write_text("{")
    spec = model_specs(config_of(folder, models_dir=str(folder)))["team/pirate:v1"]
    assert (spec.source, spec.system, spec.is_created) == (str(folder / "a.gguf"), "Arr", True)
    (folder / "a.gguf").unlink()
    assert kind_of(str(folder / "a.gguf")) == "text"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("models: {one: {modell: x}}", "did you mean `model`"),
        ("models: {one: /no/such.gguf}", "no model file"),
        ("models: {one: {model: smollm2, adapters: {poet: /no.gguf}}}", "no adapter /no.gguf"),
        ("models: {one: {model: smollm2, adapters: {'a:b': /no.gguf}}}", "adapters"),
        ("models: {one: {model: smollm2, idle_unload: soon}}", "takes a duration"),
        ("models: {one: {model: smollm2, parameters: {temperature: -1}}}", "temperature"),
        ("models: {smollm2: x/y}\nmodel: smollm2", "two models are called smollm2"),
        ("models: {one: smollm2}\nany_model_name: true", "--any-model-name"),
    ],
)
def test_a_wrong_declaration_is_refused_at_the_start(folder: Path, text: str, problem: str) -> None:
    from rekindle.errors import ModelError

    with pytest.raises((ConfigError, ModelError)) as refused:
        launch.check_settings(config_of(folder, text))
    assert problem in str(refused.value)


def test_a_folder_without_models_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no model in"):
        model_specs(config_of(tmp_path, models_dir=str(tmp_path)))
