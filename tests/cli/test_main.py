"""The help of the command line covers everything, and errors are one sentence."""

from __future__ import annotations

import asyncio
import io
import re
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main
from rich.console import Console
from typer.testing import CliRunner

import rekindle
from rekindle.cli import main as cli
from rekindle.config import SETTINGS, Config
from rekindle.errors import RekindleError
from rekindle.front import launch, library
from rekindle.http import key_file
from rekindle.http.auth import Keys
from rekindle.protocol.requests import LoadModel
from tests.support.tiny import write_llama
from tests.support.tiny_safetensors import write_tiny_folder

COMMANDS = (
    "serve", "pull", "convert", "chat", "run", "ls", "ps", "show", "rm", "bench", "key", "config",
    "doctor",
)  # fmt: skip
CACHE_COMMANDS = ("ls", "stats", "show", "pin", "unpin", "rm", "gc", "check", "explain", "backup")
#: Flags that existing scripts use.
SERVE_FLAGS = (
    "--model", "--host", "--port", "--exact", "--api-key", "--ram-cache", "--parallel",
    "--max-model-len", "--kv-fraction", "--gpu-layers", "--config", "--threads", "--queue",
    "--disk-cache", "--cache-dir", "--cache-write", "--force-cache", "--context-cache",
    "--cache-eviction",
    "--admin-key", "--api-keys-file", "--fp8-kvcache", "--kv-bits", "--disk-floor",
    "--tool-format", "--reasoning-format", "--normalise", "--cache-secret-file",
)  # fmt: skip


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings except the test's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("REKINDLE_MODELS_DIR", str(tmp_path / "models"))
    for name in ("REKINDLE_API_KEY", "REKINDLE_CACHE_DIR", "MAX_KV_SIZE_GB"):
        monkeypatch.delenv(name, raising=False)


def shown(*arguments: str) -> str:
    result = CliRunner().invoke(cli.app, list(arguments), env={"TERM": "dumb"})
    assert result.exit_code == 0, result.output
    return result.output


def failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> str:
    """The message that a failed command prints."""
    monkeypatch.setattr(sys, "argv", ["rekindle", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    message = capsys.readouterr().err.strip()
    assert message.startswith("error: ")
    assert len(message.splitlines()) == 1
    return message


def flags_of(*path: str) -> list[str]:
    command: Any = typer.main.get_command(cli.app)
    for name in path:
        command = command.commands[name]
    return [flag for option in command.params for flag in option.opts]


def test_help_lists_the_commands() -> None:
    assert all(command in shown("--help") for command in (*COMMANDS, "cache"))
    assert all(f" {command} " in shown("cache", "--help") for command in CACHE_COMMANDS)


@pytest.mark.parametrize(
    "command", [(name,) for name in COMMANDS] + [("cache", name) for name in CACHE_COMMANDS]
)
def test_the_help_of_a_command_mentions_and_explains_every_flag(command: tuple[str, ...]) -> None:
    text = shown(*command, "--help")
    for flag in flags_of(*command):
        if flag.startswith("--") and flag != "--help":
            [line] = [line for line in text.splitlines() if f" {flag} " in line]
            explained = re.sub(r"^.*?(<[^>]*>|(--?[\w-]+ +)+)", "", line.strip(" │"))
            assert len(explained.strip()) > 4, f"{flag} is not explained"


@pytest.mark.parametrize("command", [(), ("serve",), ("ls",), ("cache",), ("cache", "ls")])
def test_the_help_shows_no_type_next_to_a_switch(command: tuple[str, ...]) -> None:
    """A switch takes no value, and `--exact true` would be an error."""
    assert "bool" not in shown(*command, "--help")


def test_the_help_names_the_first_commands_to_try() -> None:
    text = shown("--help")
    assert "Begin with `rekindle run`" in text
    assert text.index("Serve and chat") < text.index("Models") < text.index("This machine")


def test_serve_has_the_flags_that_scripts_rely_on() -> None:
    assert set(SERVE_FLAGS) <= set(flags_of("serve"))


@pytest.mark.parametrize(
    "default", ["127.0.0.1", "8080", "one per core", "rekindle.yaml here", "org/repo[:quant]"]
)
def test_the_help_of_serve_shows_the_defaults(default: str) -> None:
    assert default in shown("serve", "--help")


def test_every_flag_of_serve_is_a_setting() -> None:
    names = {flag[2:].replace("-", "_") for flag in flags_of("serve")}
    assert names - set(SETTINGS) == {"config"}


def test_the_version_is_shown() -> None:
    assert shown("--version") == f"rekindle {rekindle.__version__}\n"


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    found: list[Config] = []
    monkeypatch.setattr(launch, "serve", lambda config, _console, _load: found.append(config))
    return found


def test_flags_reach_the_settings(served: list[Config]) -> None:
    shown(
        "serve", "--model", "smollm2", "--model", "other", "--host", "::1", "--port", "0",
        "--api-key", "a,b", "--api-key", "c", "--exact", "--parallel", "3", "--queue", "4",
        "--max-model-len", "512", "--kv-fraction", "0.4", "--ram-cache", "1GiB", "--threads", "2",
        "--gpu-layers", "0", "--log-level", "debug", "--no-auth", "--disk-cache", "5GB",
        "--disk-floor", "2GB", "--cache-dir", "/kv", "--cache-write", "named", "--force-cache",
        "--cache-eviction", "hit-density",
        "--no-context-cache", "--admin-key", "root", "--api-keys-file", "/keys", "--fp8-kvcache",
        "--no-normalise", "--tool-format", "hermes", "--reasoning-format", "none",
        "--cache-secret-file", "/secret", "--park-fraction", "0.2",
    )  # fmt: skip
    [config] = served
    given = {
        "model": ("smollm2", "other"), "host": "::1", "port": 0, "api_key": ("a,b", "c"),
        "exact": True, "parallel": 3, "queue": 4, "max_model_len": 512, "kv_fraction": 0.4,
        "ram_cache": 1 << 30, "threads": 2, "gpu_layers": 0, "log_level": "debug", "no_auth": True,
        "disk_cache": 5 * 10**9, "disk_floor": 2 * 10**9, "cache_dir": Path("/kv"),
        "cache_write": "named", "force_cache": True, "context_cache": False,
        "cache_eviction": "hit-density",
        "admin_key": ("root",), "api_keys_file": Path("/keys"), "fp8_kvcache": True,
        "normalise": False, "tool_format": "hermes", "reasoning_format": "none",
        "cache_secret_file": Path("/secret"), "park_fraction": 0.2,
    }  # fmt: skip
    assert {**vars(config), **given} == vars(config)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("--server --m M --context-cache", "serve --model M --context-cache"),
        ("--m M --server --port 1", "serve --model M --port 1"),
        ("--server --m=M", "serve --model=M"),
        ("serve --m X --m Y", "serve --model X --model Y"),
        ("serve --max-model-len 5 --model X", "serve --max-model-len 5 --model X"),
        ("--server", "serve"),
        ("serve --embedding-model", "serve --embedding-model minilm"),
        ("serve --embedding-model --vlm", "serve --embedding-model minilm --vlm"),
        ("serve --embedding-model X --vlm", "serve --embedding-model X --vlm"),
        ("serve --embedding-model=X", "serve --embedding-model=X"),
        ("chat --m X", "chat --m X"),
        ("chat --server", "chat --server"),
        ("--version", "--version"),
        ("", ""),
    ],
)
def test_other_spellings_mean_serve_and_model(given: str, meant: str) -> None:
    assert cli.respelled(given.split()) == meant.split()


def test_the_other_spellings_reach_the_server(
    served: list[Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--server", "--m", "org/repo", "--context-cache", "--force-cache"]
    monkeypatch.setattr(sys, "argv", ["rekindle", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    [config] = served
    assert (config.model, config.context_cache, config.force_cache) == (("org/repo",), True, True)


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
    message = failure(monkeypatch, capsys, "serve", "--host", host)
    assert "--api-key" in message
    assert "--no-auth" in message


def test_an_empty_key_does_not_open_a_public_address(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("REKINDLE_API_KEY", "")
    assert "without an API key" in failure(monkeypatch, capsys, "serve", "--host", "0.0.0.0")
    assert "`--api-key`" in failure(
        monkeypatch, capsys, "serve", "--host", "0.0.0.0", "--api-key", ""
    )


@pytest.fixture
def bound_hosts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The hosts that a server would listen on."""
    opened: list[str] = []

    def stop_here(config: Config, _port: int) -> socket.socket:
        opened.append(config.host)
        raise RekindleError("far enough")

    monkeypatch.setattr(rekindle.front.launch, "bind", stop_here)
    return opened


@pytest.mark.parametrize("kind", ["--api-key", "--admin-key", "--api-keys-file"])
def test_any_kind_of_key_opens_a_public_address(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    bound_hosts: list[str],
    kind: str,
) -> None:
    Path("keys").touch(mode=0o600)
    assert "far enough" in failure(monkeypatch, capsys, "serve", "--host", "0.0.0.0", kind, "keys")
    assert bound_hosts == ["0.0.0.0"]


def test_a_missing_key_file_is_reported_before_anything_slow(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], bound_hosts: list[str]
) -> None:
    message = failure(monkeypatch, capsys, "serve", "--api-keys-file", "nowhere")
    assert "cannot read the keys in nowhere" in message
    assert bound_hosts == []


@pytest.mark.parametrize(
    ("project", "flags", "expected"),
    [
        ("model: other", (), "project a wants the model other, which is not served"),
        ("cache: {warm_on_startup: true}", ("--api-key", "k"), "`shared: true`"),
        ("cache: {warm_on_startup: true}", ("--admin-key", "k"), "`shared: true`"),
        ("cache: {warm_on_startup: true}\n    shared: true", ("--api-key", "k"), "far enough"),
        ("cache: {warm_on_startup: true}", (), "far enough"),
        ("model: smollm2", ("--api-key", "k"), "far enough"),
        ("tools: [two words]", (), "`a.tools.0.function.name`"),
        ("tools: [f, f]", (), "more than one function called 'f'"),
        ("tools: [{type: function}]", (), "`a.tools.0.function`"),
        ("tools: [f]", (), "far enough"),
    ],
)
def test_an_invalid_project_is_refused_before_anything_slow(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    bound_hosts: list[str],
    project: str,
    flags: tuple[str, ...],
    expected: str,
) -> None:
    text = f"projects:\n  a:\n    system_prompt: x\n    {project}\n"
    Path("rekindle.yaml").write_text(text)
    assert expected in failure(monkeypatch, capsys, "serve", *flags)
    assert bool(bound_hosts) == (expected == "far enough")


def test_a_new_key_is_shown_once_with_its_line() -> None:
    key, line = shown("key", "bob").splitlines()[-2:]
    name, digest = line.split()
    assert key.startswith("rk-")
    assert len(key) >= 3 + 43  # 256 bits in base64
    assert (name, digest) == ("bob", f"blake3:{key_file.key_digest(key).hex()}")
    assert shown("key", "bob").splitlines()[-2] != key


def test_a_new_key_is_appended_to_a_file_that_only_its_owner_can_read() -> None:
    file = Path("keys")
    bob = shown("key", "bob", "--file", "keys").strip()
    root = shown("key", "root", "--file", "keys", "--admin").strip()
    assert file.stat().st_mode & 0o777 == 0o600
    assert bob not in file.read_text()
    keys = Keys(file=key_file.KeyFile(file))
    assert keys.caller(f"Bearer {bob}").admin is False
    assert keys.caller(f"Bearer {root}").admin is True


def test_a_second_key_of_a_name_belongs_to_the_same_tenant_with_the_same_limits() -> None:
    limit = ["--option", "requests_per_minute=5", "--option", "group=team"]
    first = shown("key", "bob", "--file", "keys", *limit).splitlines()[-1]
    said = shown("key", "bob", "--file", "keys", "--option", "requests_per_minute=9")
    assert "same tenant" in said
    second = said.splitlines()[-1]
    keys = Keys(file=key_file.KeyFile(Path("keys")))
    old, new = (keys.caller(f"Bearer {key}") for key in (first, second))
    assert old.salt == new.salt == key_file.key_digest(first)
    assert (old.limits.requests_per_minute, new.limits.requests_per_minute) == (5, 9)
    assert old.groups == new.groups == ("team",)
    # The old key can go, and the tenant keeps its cache.
    lines = Path("keys").read_text().splitlines()
    Path("keys").write_text(lines[1] + "\n")
    later = Keys(file=key_file.KeyFile(Path("keys"))).caller(f"Bearer {second}")
    assert later.salt == old.salt


def test_a_new_key_starts_on_a_new_line() -> None:
    Path("keys").write_text("# keys of the staff")
    shown("key", "bob", "--file", "keys")
    assert len(Path("keys").read_text().splitlines()) == 2


@pytest.mark.parametrize("name", ["two words", "", "#", "x" * 65])
def test_a_name_that_would_break_the_file_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert "cannot name a key" in failure(monkeypatch, capsys, "key", name, "--file", "keys")
    assert not Path("keys").exists()


def test_a_used_port_is_reported_before_anything_slow(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def never(*_: Any, **__: Any) -> Path:
        raise AssertionError("the model was fetched")

    monkeypatch.setattr(library, "pull", never)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        message = failure(monkeypatch, capsys, "serve", "--port", port)
    assert f"cannot listen on 127.0.0.1 port {port}: another program uses it" in message
    assert "choose another --port" in message


def test_an_address_of_another_machine_is_reported_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    message = failure(monkeypatch, capsys, "serve", "--host", "192.0.2.1", "--no-auth")
    assert "Choose another --host or --port" in message


@pytest.mark.parametrize(
    "arguments",
    [
        ("serve", "--port", "0", "--model", "no-such-model"),
        ("pull", "no-such-model"),
        ("serve", "--port", "0", "--model", "missing[/dir].gguf"),
        ("pull", "missing[bold].gguf"),
    ],
)
def test_an_unknown_model_is_reported_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    assert arguments[-1] in failure(monkeypatch, capsys, *arguments)


def test_two_files_with_the_same_name_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same.gguf").touch()
    arguments = ("--model", "a/same.gguf", "--model", "b/same.gguf")
    message = failure(monkeypatch, capsys, "serve", "--port", "0", *arguments)
    assert "would both be called same" in message


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("serve", "--ram-cache", "lots"), "`--ram-cache`"),
        (("serve", "--log-level", "loud"), "`--log-level`"),
        (("serve", "--config", "missing.yaml"), "missing.yaml"),
        (("pull", "smollm2", "--config", "missing.yaml"), "missing.yaml"),
    ],
)
def test_a_wrong_setting_is_reported_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    named: str,
) -> None:
    assert named in failure(monkeypatch, capsys, *arguments)


def test_an_error_is_shown_without_markup_and_line_breaks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Brackets in a path are not markup, and a long sentence stays on one line."""
    message = "cannot load [/models/x] " + "because " * 60 + "[bold]"

    def fail(*_: Any) -> None:
        raise RekindleError(message)

    monkeypatch.setattr(launch, "serve", fail)
    assert failure(monkeypatch, capsys, "serve") == f"error: {message}"


@pytest.mark.parametrize(
    ("settings", "formats"),
    [
        ({}, ("auto", "auto")),
        ({"tool_format": "hermes", "reasoning_format": "none"}, ("hermes", "none")),
    ],
)
def test_a_configured_format_reaches_the_runtime(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], formats: tuple[str, ...]
) -> None:
    loads: list[LoadModel] = []

    def stop_here(_name: str, load: LoadModel, **_options: Any) -> None:
        loads.append(load)
        raise RekindleError("far enough")

    async def open_models() -> None:
        config, console = Config(**settings), Console(file=io.StringIO())
        load = LoadModel(path="m.gguf", settings=config.runtime)
        async with launch.open_models(config, {"smollm2": load}, console):
            pass

    monkeypatch.setattr(library, "RuntimeClient", stop_here)
    with pytest.raises(RekindleError, match="far enough"):
        asyncio.run(open_models())
    [sent] = (load.settings for load in loads)
    assert (sent.tool_format, sent.reasoning_format) == formats


def test_a_missing_plotting_library_is_reported_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A bench once ended after minutes with this error, and without its results."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    message = failure(monkeypatch, capsys, "bench", "--png", "bench.png")
    assert "matplotlib" in message
    assert "--html" in message


def test_a_folder_is_converted_and_the_path_printed(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "tiny")
    path = Path(shown("convert", str(folder), "--quant", "q8_0").strip().splitlines()[-1])
    assert path.parent == tmp_path / "models" / "converted"
    assert path.is_file()
    output = tmp_path / "own.gguf"
    assert shown("convert", str(folder), "-o", str(output)).endswith(f"{output}\n")
    assert output.is_file()


def test_what_is_no_folder_is_not_converted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = write_llama(tmp_path / "tiny.gguf")
    assert "it is ready to serve" in failure(monkeypatch, capsys, "convert", str(file))


def test_pull_converts_for_llama_cpp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_tiny_folder(tmp_path / "tiny")
    assert shown("pull", str(folder)).endswith(f"{folder}\n")  # MLX is installed here
    monkeypatch.setenv("REKINDLE_ENGINE", "llama.cpp")
    path = Path(shown("pull", str(folder)).strip().splitlines()[-1])
    assert path.suffix == ".gguf"
    assert path.is_file()
