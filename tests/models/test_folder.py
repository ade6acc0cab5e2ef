"""A model folder is complete, or refused with the missing part."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from rekindle.errors import ModelError
from rekindle.models import folder as model_folder
from rekindle.models.folder import CONFIG, INDEX, check_folder, is_model_folder, read_json

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A complete folder with two weight files."""
    (tmp_path / CONFIG).write_text("{}")
    for name, file in (("a", FIRST), ("b", SECOND)):
        save_file({name: np.zeros(2, np.float32)}, tmp_path / file)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": FIRST, "b": SECOND}}))
    return tmp_path


def test_a_whole_folder_names_its_tensors(folder: Path) -> None:
    assert is_model_folder(folder)
    assert check_folder(folder) == ["a", "b"]


def test_a_folder_without_an_index_is_whole_as_it_is(folder: Path) -> None:
    (folder / INDEX).unlink()
    assert check_folder(folder) == ["a", "b"]


@pytest.mark.parametrize("lost", [CONFIG, FIRST, SECOND])
def test_missing_files_are_named(folder: Path, lost: str) -> None:
    (folder / lost).unlink()
    with pytest.raises(ModelError, match=rf"{lost}.*Fetch the model again"):
        check_folder(folder)


def test_weights_under_other_names_are_not_found(folder: Path) -> None:
    (folder / FIRST).rename(folder / "weights.safetensors")
    (folder / SECOND).unlink()
    assert is_model_folder(folder)
    with pytest.raises(ModelError, match=r"has no model\*\.safetensors"):
        check_folder(folder)


def test_files_of_two_models_in_one_folder_are_refused(folder: Path) -> None:
    save_file({"a": np.zeros(2, np.float32)}, folder / "model.safetensors")
    with pytest.raises(ModelError, match="has a 2 times"):
        check_folder(folder)


def test_files_without_any_tensor_are_refused(tmp_path: Path) -> None:
    (tmp_path / CONFIG).write_text("{}")
    save_file({}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="has any tensor 0 times"):
        check_folder(tmp_path)


@pytest.mark.parametrize("index", ["{}", '{"weight_map": {}}', '{"weight_map": 3}'])
def test_an_index_that_names_nothing_is_refused(folder: Path, index: str) -> None:
    (folder / INDEX).write_text(index)
    with pytest.raises(ModelError, match="names no weights"):
        check_folder(folder)


def test_an_index_cannot_name_a_file_elsewhere(folder: Path) -> None:
    names = {"a": f"../{folder.name}/{FIRST}", "b": SECOND}
    (folder / INDEX).write_text(json.dumps({"weight_map": names}))
    with pytest.raises(ModelError, match="1 of 2 files of weights are missing"):
        check_folder(folder)


@pytest.mark.parametrize("text", ["", "[]", "3", "{", "[" * 100_000, "\udcff"])
def test_settings_have_to_be_an_object(tmp_path: Path, text: str) -> None:
    (tmp_path / CONFIG).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ModelError, match="Fetch the model again"):
        read_json(tmp_path / CONFIG)


def test_a_file_above_the_size_limit_is_not_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_folder, "MAX_JSON_BYTES", 1)
    with pytest.raises(ModelError, match="larger than"):
        read_json(folder / CONFIG)


def test_other_folders_are_not_models(tmp_path: Path) -> None:
    assert not is_model_folder(tmp_path)
    (tmp_path / CONFIG).write_text("{}")
    assert not is_model_folder(tmp_path)
    assert not is_model_folder(tmp_path / CONFIG)
    assert not is_model_folder(tmp_path / "missing")
