"""Pulled models are listed under names that other commands take, and removed whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from rekindle.errors import ModelError
from rekindle.models.catalogue import SMOLLM2
from rekindle.models.local import find_pulled_model, pulled_models, remove
from rekindle.models.pull import pull

from .tiny import RecordedProgress, write_gguf


def put(models_dir: Path, repo: str, *names: str) -> Path:
    folder = models_dir / "hub" / repo
    for name in names:
        write_gguf(folder / name)
    return folder


def names(models_dir: Path) -> list[str]:
    return [model.name for model in pulled_models(models_dir)]


@pytest.fixture
def full(models_dir: Path) -> Path:
    """One of each kind."""
    write_gguf(models_dir / SMOLLM2.file_name)
    put(models_dir, "unsloth/Qwen3-4B-GGUF", "Qwen3-4B-Q4_K_M.gguf", "Qwen3-4B-Q8_0.gguf")
    put(models_dir, "org/many", "a-Q4_K_M.gguf", "b.gguf", "mmproj-F16.gguf")
    put(models_dir, "org/split", *(f"m-Q8_0-0000{n}-of-00002.gguf" for n in (1, 2)))
    put(models_dir, "org/part", "m-00001-of-00002.gguf")  # not complete
    folder = models_dir / "hub" / "mlx-community" / "Qwen3-4B-4bit"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return models_dir


def test_a_folder_without_models_lists_none(models_dir: Path) -> None:
    assert names(models_dir) == []


def test_every_complete_model_is_listed_by_the_name_to_use(full: Path) -> None:
    assert names(full) == [
        "org/many",
        "org/many:b.gguf",
        "org/split",
        "qwen3:4b",
        "qwen3:4b-mlx",
        "qwen3:4b-q8_0",
        "smollm2",
    ]


def test_every_listed_name_finds_its_model_without_a_hub(
    full: Path, progress: RecordedProgress
) -> None:
    for model in pulled_models(full):
        assert find_pulled_model(model.name, full) == model
        if model.path.is_file():
            assert pull(model.name, models_dir=full, progress=progress) == model.path
    assert find_pulled_model("Qwen3:4B", full).name == "qwen3:4b"
    assert find_pulled_model("unsloth/Qwen3-4B-GGUF:Q8_0", full).name == "qwen3:4b-q8_0"
    assert find_pulled_model("smollm2-shapes", full).name == "smollm2"
    assert find_pulled_model("mlx-community/Qwen3-4B-4bit", full).name == "qwen3:4b-mlx"


def test_the_size_counts_every_file_of_a_model(full: Path) -> None:
    one = (full / SMOLLM2.file_name).stat().st_size
    sizes = {model.name: model.size_bytes for model in pulled_models(full)}
    assert sizes["smollm2"] == one
    assert sizes["org/split"] == sizes["org/many"] == 2 * one  # a part, and a projector


def test_a_removed_model_is_gone_with_all_its_files(full: Path) -> None:
    split = find_pulled_model("org/split", full)
    size_bytes = split.size_bytes
    assert remove(split, full) == size_bytes
    assert "org/split" not in names(full)
    assert not (full / "hub" / "org" / "split").exists()
    remove(find_pulled_model("qwen3:4b-mlx", full), full)
    assert not (full / "hub" / "mlx-community" / "Qwen3-4B-4bit").exists()


def test_a_projector_stays_as_long_as_another_model_needs_it(full: Path) -> None:
    projector = full / "hub" / "org" / "many" / "mmproj-F16.gguf"
    remove(find_pulled_model("org/many:b.gguf", full), full)
    assert projector.is_file()
    remove(find_pulled_model("org/many", full), full)
    assert not projector.exists()


@pytest.mark.parametrize("name", ["minilm", "qwen3", "org/none", "qwen3:4b-q2_k"])
def test_a_model_that_was_not_pulled_is_named(full: Path, name: str) -> None:
    with pytest.raises(ModelError, match=rf"{name} is not .* `rekindle pull {name}`"):
        find_pulled_model(name, full)


def test_an_unknown_name_points_to_the_list_of_models_that_are_here(full: Path) -> None:
    with pytest.raises(ModelError, match=r"called 'nix'\. `rekindle ls` lists"):
        find_pulled_model("nix", full)


def test_a_file_of_the_users_own_is_never_removed(full: Path, tmp_path: Path) -> None:
    own = write_gguf(tmp_path / "mine.gguf")
    with pytest.raises(ModelError, match="of yours"):
        find_pulled_model(str(own), full)
