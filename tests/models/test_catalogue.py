from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from rekindle.config import SETTINGS, Config
from rekindle.errors import ModelError
from rekindle.models.catalogue import (
    CATALOGUE,
    DEFAULT_EMBEDDING_MODEL,
    DEFAULT_MODEL,
    DEFAULT_VISION_MODEL,
    SMOLLM2,
    HubModel,
    PackagedModel,
    locate,
)
from rekindle.models.gguf import check_gguf
from rekindle.models.pull import packaged_projector

MODELS = Path("models")


def test_the_default_models_are_in_the_catalogue() -> None:
    for name in (DEFAULT_MODEL, DEFAULT_EMBEDDING_MODEL):
        assert CATALOGUE[name].name == name


def test_every_entry_is_pinned_and_licensed() -> None:
    for model in CATALOGUE.values():
        assert "==" in model.requirement
        assert len(bytes.fromhex(model.sha256)) == 32
        assert model.member.endswith(model.file_name) or model.written_from
        for part in model.written_from:
            assert len(bytes.fromhex(part.sha256)) == 32
        assert model.licence


def test_the_demo_model_has_a_limit_because_it_rarely_stops_by_itself() -> None:
    for name in (DEFAULT_MODEL, DEFAULT_VISION_MODEL):
        assert CATALOGUE[name].defaults.max_tokens == 1000


def test_the_defaults_of_an_entry_are_settings_with_valid_values() -> None:
    for model in CATALOGUE.values():
        defaults = asdict(model.defaults)
        assert defaults.keys() <= SETTINGS.keys()
        Config(**{name: value for name, value in defaults.items() if value is not None})


def test_entries_that_share_a_file_mean_the_same_bytes() -> None:
    pinned = {(model.file_name, model.sha256) for model in CATALOGUE.values()}
    assert len(pinned) == len({name for name, _ in pinned})


def test_the_default_vision_model_has_a_projector_in_this_package() -> None:
    projector = packaged_projector(DEFAULT_VISION_MODEL)
    assert projector is not None
    check_gguf(projector)
    assert packaged_projector(DEFAULT_MODEL) is None


def test_a_catalogue_name_is_kept_in_the_models_folder() -> None:
    assert locate("smollm2", MODELS) == PackagedModel(SMOLLM2, MODELS / SMOLLM2.file_name)


def test_a_folder_with_a_model_is_local(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"a folder without config\.json and model\*"):
        locate(str(tmp_path), MODELS)
    (tmp_path / "config.json").touch()
    (tmp_path / "model.safetensors").touch()
    assert locate(str(tmp_path), MODELS) == tmp_path


def test_an_existing_file_is_local_whatever_its_name(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.touch()
    assert locate(str(file), MODELS) == file


def test_a_tilde_means_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    (tmp_path / "mine.gguf").touch()
    assert locate("~/mine.gguf", MODELS) == tmp_path / "mine.gguf"


@pytest.mark.parametrize(
    ("name", "repo", "wanted"),
    [
        ("org/repo", "org/repo", None),
        ("org/Repo-1.5_GGUF:Q4_K_M", "org/Repo-1.5_GGUF", "Q4_K_M"),
        ("org/repo:file.gguf", "org/repo", "file.gguf"),
        ("org/repo:Q8_0/file-00001-of-00002.gguf", "org/repo", "Q8_0/file-00001-of-00002.gguf"),
    ],
)
def test_a_hub_id_has_a_repository_and_maybe_a_file_or_quantisation(
    name: str, repo: str, wanted: str | None
) -> None:
    assert locate(name, MODELS) == HubModel(repo, wanted, MODELS / "hub" / repo)


@pytest.mark.parametrize(
    ("name", "repo", "wanted", "full"),
    [
        ("qwen3", "unsloth/Qwen3-8B-GGUF", None, "qwen3:8b"),
        ("qwen3:latest", "unsloth/Qwen3-8B-GGUF", None, "qwen3:8b"),
        ("Qwen3:4B-Q8_0", "unsloth/Qwen3-4B-GGUF", "Q8_0", "qwen3:4b"),
        ("qwen3:4b-mlx", "mlx-community/Qwen3-4B-4bit", None, "qwen3:4b-mlx"),
        ("bge-reranker:v2-m3", "gpustack/bge-reranker-v2-m3-GGUF", None, "bge-reranker:v2-m3"),
        ("gpt-oss", "ggml-org/gpt-oss-20b-GGUF", None, "gpt-oss:20b"),
    ],
)
def test_a_short_name_means_a_repository_of_a_hub(
    name: str, repo: str, wanted: str | None, full: str
) -> None:
    assert locate(name, MODELS) == HubModel(repo, wanted, MODELS / "hub" / repo, full)


@pytest.mark.parametrize(
    "name", ["qwen3:9b", "qwen3:4", "gemma3:4b-", "llama3.2:", "phi4:14b-mlx-"]
)
def test_an_unknown_size_is_answered_with_those_of_the_family(name: str) -> None:
    family = name.partition(":")[0]
    expected = "No model is called" if name.endswith(":") else rf"sizes of {family} are {family}:"
    with pytest.raises(ModelError, match=expected):
        locate(name, MODELS)


def test_an_unknown_name_is_answered_with_similar_ones_and_the_command_that_lists_all() -> None:
    with pytest.raises(ModelError, match=r"mean smollm2 or .* `rekindle ls --catalogue`") as error:
        locate("smolllm2", MODELS)
    assert "gemma3" not in str(error.value)


def test_a_file_or_folder_wins_over_a_short_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("qwen3").write_bytes(b"GGUF")
    assert locate("qwen3", MODELS) == Path("qwen3")


@pytest.mark.parametrize(
    "name", ["gone.gguf", "./gone", "../gone", "/gone", "~/gone", "~nobody-here/gone", "a/b/c.gguf"]
)
def test_a_path_to_nothing_is_reported_as_a_missing_file(name: str) -> None:
    with pytest.raises(ModelError, match="no model file"):
        locate(name, MODELS)


def test_a_folder_is_reported_as_a_folder_not_as_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"is a folder.*inside"):
        locate(str(tmp_path), MODELS)


@pytest.mark.parametrize("name", ["smolm2", "SmolLM2", "smollm"])
def test_a_misspelt_name_suggests_the_right_one(name: str) -> None:
    with pytest.raises(ModelError, match=r"Did you mean .*\bsmollm2\b"):
        locate(name, MODELS)


@pytest.mark.parametrize(
    "name", ["", " ", "zebra", "a/b/c", "org/repo:", "org/repo:../up", "\0", "x" * 5000, "org/é"]
)
def test_an_unknown_name_is_answered_with_the_accepted_forms(name: str) -> None:
    with pytest.raises(
        ModelError,
        match=r"`rekindle ls --catalogue` lists, .*\.gguf file.*org/repo",
    ):
        locate(name, MODELS)


@pytest.mark.parametrize("name", ["../..", "org/..", "./..", "org/repo:a/../../../b"])
def test_no_name_leads_out_of_the_models_folder(name: str) -> None:
    try:
        source = locate(name, MODELS)
    except ModelError:
        return
    assert isinstance(source, HubModel)
    assert source.folder.resolve().is_relative_to((MODELS / "hub").resolve())
