"""The chat template of a folder is found in all of its usual places."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rekindle.errors import ModelError
from rekindle.models.folder import MAX_TEMPLATE_BYTES, read_chat_template


def write(folder: Path, name: str, template: Any) -> None:
    text = template if name.endswith(".jinja") else json.dumps({"chat_template": template})
    (folder / name).write_text(text)


def test_a_template_file_precedes_settings(tmp_path: Path) -> None:
    assert read_chat_template(tmp_path) is None
    for name in ("tokenizer_config.json", "chat_template.json", "chat_template.jinja"):
        write(tmp_path, name, name)
        assert read_chat_template(tmp_path) == name


@pytest.mark.parametrize(
    ("named", "chosen"),
    [
        ({"default": "a", "tool_use": "b"}, "a"),
        ({"rag": "c", "tool_use": "b"}, "b"),
        ({"rag": "c"}, "c"),
        ({}, None),
    ],
)
def test_of_several_templates_one_is_chosen(
    tmp_path: Path, named: dict[str, str], chosen: str | None
) -> None:
    listed = [{"name": name, "template": text} for name, text in named.items()]
    write(tmp_path, "tokenizer_config.json", listed)
    assert read_chat_template(tmp_path) == chosen


@pytest.mark.parametrize("template", [3, {"a": "b"}, [3], [{"name": "default"}], [{"name": []}]])
def test_other_values_are_not_templates(tmp_path: Path, template: Any) -> None:
    write(tmp_path, "tokenizer_config.json", template)
    assert read_chat_template(tmp_path) is None


def test_a_template_above_the_size_limit_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "chat_template.jinja", " " * (MAX_TEMPLATE_BYTES + 1))
    with pytest.raises(ModelError, match="larger than any"):
        read_chat_template(tmp_path)
