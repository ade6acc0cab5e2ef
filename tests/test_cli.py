"""The command line: help that tells everything, errors that are one sentence."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

import rekindle
import rekindle.chat
import rekindle.serve
from rekindle import cli
from rekindle.chat import Conversation
from rekindle.config import Config
from rekindle.errors import RekindleError

COMMANDS = ("serve", "pull", "chat", "bench")
#: What scripts rely on, as far as it is served.
SERVE_FLAGS = (
    "--model", "--host", "--port", "--exact", "--api-key", "--ram-cache", "--parallel",
    "--max-model-len", "--kv-fraction", "--gpu-layers", "--config", "--threads", "--queue",
)  # fmt: skip


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings but a test's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("REKINDLE_MODELS_DIR", str(tmp_path / "models"))
    monkeypatch.delenv("REKINDLE_API_KEY", raising=False)


def shown(*arguments: str) -> str:
    result = CliRunner().invoke(cli.app, list(arguments), env={"TERM": "dumb"})
    assert result.exit_code == 0, result.output
    return result.output


def failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> str:
    """What a person reads whose command failed."""
    monkeypatch.setattr(sys, "argv", ["rekindle", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    said = capsys.readouterr().err.strip()
    assert said.startswith("error: ")
    assert len(said.splitlines()) == 1
    return said


def flags_of(command: str) -> list[str]:
    group: Any = typer.main.get_command(cli.app)
    return [flag for option in group.commands[command].params for flag in option.opts]


def test_help_lists_the_commands() -> None:
    assert all(command in shown("--help") for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_mentions_and_explains_every_flag(command: str) -> None:
    text = shown(command, "--help")
    for flag in flags_of(command):
        if flag.startswith("--") and flag != "--help":
            [line] = [line for line in text.splitlines() if f" {flag} " in line]
            assert len(line.strip(" │").split(">", 1)[1].strip()) > 4, f"{flag} is not explained"


def test_serve_has_the_flags_that_scripts_rely_on() -> None:
    assert set(SERVE_FLAGS) <= set(flags_of("serve"))


@pytest.mark.parametrize(
    "default", ["127.0.0.1", "8080", "all cores", "rekindle.yaml if there", "org/repo[:quant]"]
)
def test_the_help_of_serve_tells_the_defaults(default: str) -> None:
    assert default in shown("serve", "--help")


def test_every_flag_of_serve_is_a_setting() -> None:
    names = {flag[2:].replace("-", "_") for flag in flags_of("serve")}
    assert names - set(Config.model_fields) == {"config"}


def test_the_version_is_told() -> None:
    assert shown("--version") == f"rekindle {rekindle.__version__}\n"


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    found: list[Config] = []
    monkeypatch.setattr(rekindle.serve, "serve", lambda config, _console: found.append(config))
    return found


def test_flags_reach_the_settings(served: list[Config]) -> None:
    shown(
        "serve", "--model", "smollm2", "--model", "other", "--host", "::1", "--port", "0",
        "--api-key", "a,b", "--api-key", "c", "--exact", "--parallel", "3", "--queue", "4",
        "--max-model-len", "512", "--kv-fraction", "0.4", "--ram-cache", "1GiB", "--threads", "2",
        "--gpu-layers", "0", "--log-level", "debug", "--no-auth",
    )  # fmt: skip
    [config] = served
    given = {
        "model": ("smollm2", "other"), "host": "::1", "port": 0, "api_key": ("a,b", "c"),
        "exact": True, "parallel": 3, "queue": 4, "max_model_len": 512, "kv_fraction": 0.4,
        "ram_cache": 1 << 30, "threads": 2, "gpu_layers": 0, "log_level": "debug", "no_auth": True,
    }  # fmt: skip
    assert {**config.model_dump(), **given} == config.model_dump()


def test_flags_win_over_the_environment_and_the_file(
    served: list[Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("mine.yaml").write_text("port: 1\nparallel: 1\nqueue: 1\n")
    monkeypatch.setenv("REKINDLE_PARALLEL", "2")
    monkeypatch.setenv("REKINDLE_QUEUE", "2")
    shown("serve", "--config", "mine.yaml", "--queue", "3")
    assert [(config.port, config.parallel, config.queue) for config in served] == [(1, 2, 3)]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_serve_refuses_a_public_address_without_a_key(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], host: str
) -> None:
    said = failure(monkeypatch, capsys, "serve", "--host", host)
    assert "--api-key" in said
    assert "--no-auth" in said


def test_an_empty_key_does_not_open_a_public_address(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("REKINDLE_API_KEY", "")
    assert "without an API key" in failure(monkeypatch, capsys, "serve", "--host", "0.0.0.0")
    assert "`--api-key`" in failure(
        monkeypatch, capsys, "serve", "--host", "0.0.0.0", "--api-key", ""
    )


def test_a_taken_port_is_known_before_anything_slow(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def never(*_: Any, **__: Any) -> Path:
        raise AssertionError("the model was fetched")

    monkeypatch.setattr(rekindle.serve, "pull", never)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        said = failure(monkeypatch, capsys, "serve", "--port", port)
    assert f"cannot listen on 127.0.0.1 port {port}" in said


@pytest.mark.parametrize(
    "arguments",
    [
        ("serve", "--port", "0", "--model", "no-such-model"),
        ("pull", "no-such-model"),
        ("serve", "--port", "0", "--model", "missing[/dir].gguf"),
        ("pull", "missing[bold].gguf"),
    ],
)
def test_an_unknown_model_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    assert arguments[-1] in failure(monkeypatch, capsys, *arguments)


def test_two_files_of_one_name_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same.gguf").touch()
    arguments = ("--model", "a/same.gguf", "--model", "b/same.gguf")
    said = failure(monkeypatch, capsys, "serve", "--port", "0", *arguments)
    assert "would both be called same" in said


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("serve", "--ram-cache", "lots"), "`--ram-cache`"),
        (("serve", "--log-level", "loud"), "`--log-level`"),
        (("serve", "--config", "missing.yaml"), "missing.yaml"),
        (("pull", "smollm2", "--config", "missing.yaml"), "missing.yaml"),
    ],
)
def test_a_wrong_setting_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    named: str,
) -> None:
    assert named in failure(monkeypatch, capsys, *arguments)


def test_an_error_is_shown_as_it_is_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Brackets in a path are no markup, and a long sentence stays one line."""
    message = "cannot load [/models/x] " + "because " * 60 + "[bold]"

    def fail(*_: Any) -> None:
        raise RekindleError(message)

    monkeypatch.setattr(rekindle.serve, "serve", fail)
    assert failure(monkeypatch, capsys, "serve") == f"error: {message}"


def test_chat_is_told_where_and_how_to_talk(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Conversation] = []
    monkeypatch.setattr(rekindle.chat, "converse", lambda talk, _console: found.append(talk))
    monkeypatch.setenv("REKINDLE_API_KEY", "secret")
    shown("chat", "--system", "Be brief.", "--max-tokens", "5", "--temperature", "0")
    [conversation] = found
    assert conversation.base_url == "http://127.0.0.1:8080/v1"
    assert (conversation.model, conversation.api_key) == ("default", "secret")
    assert conversation.options == {"max_tokens": 5, "temperature": 0.0}
    assert conversation.messages == [{"role": "system", "content": "Be brief."}]
