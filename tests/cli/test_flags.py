"""`rekindle serve` has one flag for every setting that declares one."""

from __future__ import annotations

from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from rekindle.cli import main as cli
from rekindle.config import SETTINGS

WITH_FLAG = {name: each for name, each in SETTINGS.items() if each.setting.flag}


def options() -> list[Any]:
    command: Any = typer.main.get_command(cli.app)
    return list(command.commands["serve"].params)


@pytest.fixture(scope="module")
def help_text() -> str:
    environment = {"TERM": "dumb", "COLUMNS": "200"}
    return CliRunner().invoke(cli.app, ["serve", "--help"], env=environment).output


def test_a_setting_has_a_flag_if_its_declaration_says_so() -> None:
    assert {option.name for option in options()} - {"config"} == WITH_FLAG.keys()


@pytest.mark.parametrize("name", WITH_FLAG)
def test_help_shows_a_setting_under_its_group(name: str, help_text: str) -> None:
    setting = SETTINGS[name].setting
    panel = help_text.partition(f"─ {setting.group} ─")[2].partition("╭")[0]
    [line] = [row for row in panel.splitlines() if f" --{name.replace('_', '-')} " in row]
    assert setting.help in line


def test_only_switches_that_may_be_on_by_default_can_be_turned_off() -> None:
    off = {flag for option in options() for flag in option.secondary_opts}
    assert off == {"--no-context-cache", "--no-normalise", "--no-vlm"}


@pytest.mark.parametrize("default", ["(1GiB)", "(0.3)", "(16)", "(~/.cache/rekindle/kv)"])
def test_a_default_is_shown_as_it_would_be_written(default: str, help_text: str) -> None:
    assert f"[default: {default}]" in help_text
