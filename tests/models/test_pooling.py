"""The output modules of a folder are read as sentence-transformers writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rekindle.errors import ModelError
from rekindle.models.pooling import OutputModules, read_modules

NORMALIZE = ("sentence_transformers.models.Normalize", "2_Normalize")


def write(folder: Path, pooling: dict[str, Any] | None, *modules: tuple[str, str]) -> Path:
    named = [("sentence_transformers.models.Transformer", "")]
    if pooling is not None:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling/config.json").write_text(json.dumps(pooling))
        named.append(("sentence_transformers.models.Pooling", "1_Pooling"))
    listed = [
        {"idx": number, "name": str(number), "type": kind, "path": path}
        for number, (kind, path) in enumerate([*named, *modules])
    ]
    (folder / "modules.json").write_text(json.dumps(listed[::-1]))
    return folder


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({"pooling_mode_cls_token": True, "word_embedding_dimension": 8}, "cls"),
        ({"pooling_mode_lasttoken": True, "include_prompt": True}, "last"),
        ({"pooling_mode": "lasttoken", "embedding_dimension": 8}, "last"),
        ({"pooling_mode": ["mean"]}, "mean"),
    ],
)
def test_the_pooling_is_read_in_both_forms(
    tmp_path: Path, config: dict[str, Any], pooling: Any
) -> None:
    assert read_modules(write(tmp_path, config)) == OutputModules(pooling, normalises=False)
    (tmp_path / "modules.json").unlink()  # as a conversion may leave it
    assert read_modules(tmp_path) == OutputModules(pooling)


def test_a_normalize_module_is_found_by_its_class(tmp_path: Path) -> None:
    folder = write(tmp_path, {"pooling_mode": "cls"}, NORMALIZE)
    assert read_modules(folder) == OutputModules("cls", normalises=True)


def test_a_folder_that_says_nothing_leaves_the_pooling_open(tmp_path: Path) -> None:
    assert read_modules(tmp_path) == OutputModules()


def test_the_answers_of_a_reranker_are_read(tmp_path: Path) -> None:
    kind = "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"
    folder = write(tmp_path, None, (kind, "1_LogitScore"))
    (folder / "1_LogitScore").mkdir()
    path = folder / "1_LogitScore/config.json"
    path.write_text(json.dumps({"true_token_id": 7, "false_token_id": 5}))
    assert read_modules(folder).score_tokens == (7, 5)
    path.write_text("{}")
    with pytest.raises(ModelError, match="names no `true_token_id`"):
        read_modules(folder)


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({"pooling_mode_max_tokens": True}, "max_tokens"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, "and"),
        ({"pooling_mode": "weightedmean"}, "weightedmean"),
        ({"pooling_mode": ["cls", "mean"]}, "cls and mean"),
        ({"word_embedding_dimension": 8}, "none"),
    ],
)
def test_another_pooling_is_refused(tmp_path: Path, config: dict[str, Any], what: str) -> None:
    with pytest.raises(ModelError, match=f"{what}.*give a model with mean, cls or lasttoken"):
        read_modules(write(tmp_path, config))


def test_another_module_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, {"pooling_mode": "mean"}, ("sentence_transformers.Dense", "2_Dense"))
    with pytest.raises(ModelError, match=r"has a Dense module .*serve a GGUF file"):
        read_modules(folder)


@pytest.mark.parametrize("path", ["../other", "/etc", "a/b", "..", ""])
def test_a_module_outside_of_the_folder_is_refused(tmp_path: Path, path: str) -> None:
    folder = write(tmp_path, None, ("sentence_transformers.models.Pooling", path))
    with pytest.raises(ModelError, match="names the module folder"):
        read_modules(folder)


def test_a_transformer_in_a_folder_of_its_own_is_refused(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text(
        json.dumps([{"idx": 0, "name": "0", "path": "0_BERT", "type": "x.Transformer"}])
    )
    with pytest.raises(ModelError, match=r"keeps its transformer in the folder '0_BERT': move"):
        read_modules(tmp_path)


@pytest.mark.parametrize("content", ["{}", "[1]", '[{"idx": "a"}]', "[[", '[{"idx": null}]'])
def test_damaged_modules_are_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "modules.json").write_text(content)
    with pytest.raises(ModelError, match=r"is not a list of modules\. Fetch the model again"):
        read_modules(tmp_path)
