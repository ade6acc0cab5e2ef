"""`rekindle config` shows what is in force, and where it was set."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rekindle.cli import main as cli
from rekindle.config import SETTINGS


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    for name in ("REKINDLE_API_KEY", "REKINDLE_CACHE_DIR", "REKINDLE_THREADS", "MAX_KV_SIZE_GB"):
        monkeypatch.delenv(name, raising=False)


def shown(*arguments: str) -> str:
    result = CliRunner().invoke(cli.app, ["config", *arguments], env={"TERM": "dumb"})
    assert result.exit_code == 0, result.output
    return result.stdout


def rows(text: str) -> dict[str, list[str]]:
    """The cells of each line, by its first cell."""
    cells = (line.strip().split("  ") for line in text.splitlines())
    found = ([cell.strip() for cell in line if cell.strip()] for line in cells)
    return {name: rest for name, *rest in filter(None, found)}


def test_every_setting_is_shown_with_its_value_and_where_it_was_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = Path("rekindle.yaml").absolute()
    file.write_text("port: 9000\nparallel: 4\nram_cache: 512MiB\nvlm: true\n")
    monkeypatch.setenv("REKINDLE_PARALLEL", "2")
    monkeypatch.setenv("MAX_KV_SIZE_GB", "3")
    text = shown()
    assert f"Settings file: {file}" in text
    found = rows(text)
    assert set(SETTINGS) <= set(found)
    assert found["port"] == ["9000", "settings file"]
    assert found["parallel"] == ["2", "REKINDLE_PARALLEL"]
    assert found["disk_cache"] == ["3GB", "MAX_KV_SIZE_GB"]
    assert found["ram_cache"] == ["512MiB", "settings file"]
    assert found["vlm"] == ["true", "settings file"]
    assert found["host"] == ["127.0.0.1", "default"]
    assert found["threads"] == ["one per core, at most 16", "default"]


def test_only_what_was_given_is_shown_on_demand() -> None:
    Path("mine.yaml").write_text("queue: 3\n")
    found = rows(shown("--given", "--config", "mine.yaml"))
    assert set(SETTINGS) & set(found) == {"queue"}


def test_without_a_file_the_places_of_one_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "users"))
    text = shown()
    assert str(tmp_path / "rekindle.yaml") in text
    assert str(tmp_path / "users" / "rekindle" / "rekindle.yaml") in text


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_a_key_is_never_shown(monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]) -> None:
    monkeypatch.setenv("REKINDLE_API_KEY", "canary")
    text = shown(*flags)
    assert "canary" not in text
    assert "(hidden)" in text


def test_scripts_get_json() -> None:
    Path("rekindle.yaml").write_text("model: [a, b]\nprojects: {p: {system_prompt: x}}\n")
    found = json.loads(shown("--json"))
    file = str(Path("rekindle.yaml").absolute())
    assert found["model"] == {"value": ["a", "b"], "from": file}
    assert found["projects"]["value"] == ["p"]
    assert found["port"] == {"value": 8080, "from": "default"}
    assert set(found) == set(SETTINGS)
