"""`rekindle service` writes systemd units that systemd accepts, and that restart and stop well."""

from __future__ import annotations

import configparser
import shutil
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from rekindle.cli import main as cli
from rekindle.cli import service
from rekindle.cli.service import Service, install, remove, verify
from rekindle.errors import RekindleError

PROGRAM = Path("/bin/true")  # systemd checks that the program exists


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(service, "SYSTEM_UNITS", tmp_path / "units")
    monkeypatch.setattr(service, "SYSTEM_CONFIG", tmp_path / "rekindle.yaml")


def parsed(unit: Service) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(unit.unit())
    return parser


def test_the_unit_starts_the_server_with_the_given_flags() -> None:
    unit = parsed(Service(PROGRAM, ("--model", "a model.gguf", "--api-key", "100%$x")))
    command = unit["Service"]["ExecStart"]
    assert command == '/bin/true serve --model "a model.gguf" --api-key 100%%$$x'
    assert unit["Install"]["WantedBy"] == "default.target"


def test_the_unit_restarts_a_crash_and_waits_for_the_state_to_be_written() -> None:
    found = parsed(Service(PROGRAM))["Service"]
    assert found["Restart"] == "on-failure"
    assert int(found["TimeoutStopSec"]) > 120  # the time that a model has to write its state
    assert found["KillMode"] == "mixed"  # SIGTERM reaches the server, which stops its models
    assert int(found["LimitNOFILE"]) >= 65_536


def test_the_unit_of_the_system_can_write_only_to_its_own_folders() -> None:
    found = parsed(Service(PROGRAM, is_system=True))["Service"]
    assert found["DynamicUser"] == found["NoNewPrivileges"] == "yes"
    assert found["ProtectSystem"] == "strict"
    assert found["CacheDirectoryMode"] == "0700"


@pytest.mark.parametrize("is_system", [False, True])
def test_systemd_accepts_the_unit(is_system: bool, tmp_path: Path) -> None:
    """Where systemd is not installed, `verify` has nothing to say, as for an installed unit."""
    path = tmp_path / "rekindle.service"
    path.write_text(Service(PROGRAM, ("--port", "1"), is_system).unit())
    assert verify(path, is_system=is_system) is None


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="there is no systemd to ask")
def test_a_unit_that_systemd_refuses_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "rekindle.service"
    path.write_text("[Service]\nExecStart=/nowhere/rekindle\n")
    assert "rekindle.service" in (verify(path, is_system=True) or "")


def test_a_unit_is_installed_and_removed(capsys: pytest.CaptureFixture[str]) -> None:
    unit = Service(PROGRAM)
    path = install(unit, Console())
    assert path.read_text() == unit.unit()
    said = capsys.readouterr().out
    assert "systemctl --user daemon-reload && systemctl --user enable --now rekindle" in said
    assert "loginctl enable-linger" in said
    remove(unit, Console())
    assert not path.exists()
    with pytest.raises(RekindleError, match="is not installed"):
        remove(unit, Console())


def test_the_service_of_the_system_needs_its_settings_file(tmp_path: Path) -> None:
    unit = Service(PROGRAM, is_system=True)
    with pytest.raises(RekindleError, match=r"does not exist\. Create it"):
        install(unit, Console())
    service.SYSTEM_CONFIG.touch()
    assert install(unit, Console()) == tmp_path / "units" / "rekindle.service"


def test_a_flag_with_a_line_end_is_refused() -> None:
    with pytest.raises(RekindleError, match="line ends"):
        Service(PROGRAM, ("--model", "a\nExecStartPre=/bin/sh")).unit()


def test_the_command_prints_the_unit_with_the_flags_after_two_dashes() -> None:
    arguments = ["service", "install", "--print", "--", "--model", "smollm2", "--port", "9000"]
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 0, result.output
    assert "rekindle serve --model smollm2 --port 9000\n" in result.output


@pytest.mark.parametrize("flags", [("--api-key", "sk"), ("--admin-key=sk",)])
def test_a_key_does_not_get_into_a_unit_file(flags: tuple[str, ...]) -> None:
    with pytest.raises(RekindleError, match="every user can read a unit file"):
        install(Service(PROGRAM, flags), Console())
    assert not Service(PROGRAM).path.exists()
