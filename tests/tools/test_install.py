"""Builds environments with the script behind `make install`, with stand-ins for Python and uv."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tools" / "install.sh"
WAIT_S = 60

#: Answers like an interpreter of some version: to questions with -c, `-m venv` and `-m pip`.
PYTHON = """#!/bin/sh
echo "$0 $@" >> "{log}"
case "$1 $2" in
  "-c import platform"*) echo {version} ;;
  "-c import ensurepip"*) exit {venv_status} ;;
  "-m venv") mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
  "-m pip") exit {pip_status} ;;
esac
"""
UV = """#!/bin/sh
echo "$0 $@" >> "{log}"
case "$1" in
  venv) [ {has_python} = 1 ] && mkdir -p .venv/bin && cp "{python}" .venv/bin/python ;;
  pip) exit {status} ;;
esac
"""


class Machine:
    """A clone of the project on a machine whose path has only what a test puts there."""

    def __init__(self, folder: Path) -> None:
        self.clone = folder / "clone"
        (self.clone / "tools").mkdir(parents=True)
        shutil.copy(SCRIPT, self.clone / "tools")
        for name in ("requirements.lock", "requirements-dev.lock"):
            (self.clone / name).write_text("blake3==1.0.11\n")
        self.path = folder / "bin"
        self.path.mkdir()
        for name in ("bash", "dirname", "rm", "touch", "grep", "mkdir", "cp"):
            found = shutil.which(name)
            assert found
            (self.path / name).symlink_to(found)
        self.log = folder / "log"
        self.environment = self.clone / ".venv"

    def _add(self, name: str, script: str) -> Path:
        file = self.path / name
        file.write_text(script)
        file.chmod(0o755)
        return file

    def add_python(self, name: str, version: str, *, venv: bool = True, pip: bool = True) -> Path:
        script = PYTHON.format(
            log=self.log, version=version, venv_status=int(not venv), pip_status=int(not pip)
        )
        return self._add(name, script)

    def add_uv(self, python: Path, *, works: bool = True, has_python: bool = True) -> None:
        script = UV.format(
            log=self.log, python=python, status=int(not works), has_python=int(has_python)
        )
        self._add("uv", script)

    def install(self, level: str = "run", python: str = "") -> subprocess.CompletedProcess[str]:
        command = ["/bin/bash", str(self.clone / "tools" / "install.sh"), level]
        environment = {"PATH": str(self.path), "PYTHON": python, "HOME": os.environ["HOME"]}
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=WAIT_S, check=False
        )

    @property
    def marks(self) -> set[str]:
        return {each.name for each in self.environment.glob(".installed-*")}

    @property
    def commands(self) -> str:
        return self.log.read_text() if self.log.exists() else ""


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.parametrize("version", ["3.9.18", "3.10.13", "3.14.0"])
def test_an_unsupported_python_is_one_sentence_and_changes_nothing(
    machine: Machine, version: str
) -> None:
    machine.add_python("python3", version)
    done = machine.install()
    assert done.returncode == 1
    assert f"needs Python 3.11, 3.12 or 3.13, but python3 is {version}." in done.stderr
    assert "make install PYTHON=" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not machine.environment.exists()


def test_a_machine_without_python_gets_the_same_sentence(machine: Machine) -> None:
    done = machine.install()
    assert done.returncode == 1
    assert "python3 is missing" in done.stderr


def test_an_unsupported_python_that_is_named_is_not_replaced_by_another(machine: Machine) -> None:
    named = machine.add_python("mine", "3.10.13")
    machine.add_python("python3", "3.12.1")
    done = machine.install(python=str(named))
    assert done.returncode == 1
    assert f"{named} is 3.10.13" in done.stderr
    assert not machine.environment.exists()


def test_a_supported_python_under_another_name_is_used(machine: Machine) -> None:
    machine.add_python("python3", "3.9.18")
    machine.add_python("python3.12", "3.12.1")
    done = machine.install()
    assert done.returncode == 0, done.stderr
    assert "with python3.12" in done.stderr
    assert machine.marks == {".installed-run"}


def test_a_python_that_cannot_build_environments_names_the_package_that_it_needs(
    machine: Machine,
) -> None:
    machine.add_python("python3", "3.11.2", venv=False)
    done = machine.install()
    assert done.returncode == 1
    assert "apt install python3.11-venv" in done.stderr
    assert not machine.environment.exists()


def test_the_script_supports_the_versions_of_the_package() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    text = SCRIPT.read_text()
    [listed] = re.findall(r'^supported="(.*)"', text, re.MULTILINE)
    accepted = [
        f"3.{minor}" for minor in range(30) if SpecifierSet(declared).contains(f"3.{minor}")
    ]
    assert sorted(listed.split()) == sorted(accepted)
    assert f'any_supported="{declared}"' in text


def test_an_environment_whose_installation_failed_is_built_again(machine: Machine) -> None:
    machine.add_python("python3", "3.12.1", pip=False)
    failed = machine.install()
    assert failed.returncode == 1
    assert "could not be installed" in failed.stderr
    assert machine.marks == set()
    leftover = machine.environment / "leftover"
    leftover.touch()

    machine.add_python("python3", "3.12.1")
    done = machine.install()
    assert done.returncode == 0, done.stderr
    assert "built again" in done.stderr
    assert machine.commands.count("-m venv --clear") == 2
    assert machine.marks == {".installed-run"}


def test_a_finished_environment_is_updated_in_place(machine: Machine) -> None:
    machine.add_python("python3", "3.12.1")
    assert machine.install("dev").returncode == 0
    assert machine.marks == {".installed-run", ".installed-dev"}
    done = machine.install("run")
    assert done.returncode == 0, done.stderr
    assert "updating .venv from requirements-dev.lock" in done.stderr
    assert machine.commands.count("-m venv") == 1
    assert machine.marks == {".installed-run", ".installed-dev"}


def test_an_update_that_fails_leaves_no_mark(machine: Machine) -> None:
    machine.add_python("python3", "3.12.1")
    assert machine.install().returncode == 0
    broken = machine.add_python("broken", "3.12.1", pip=False)
    shutil.copy(broken, machine.environment / "bin" / "python")
    (machine.path / "python3").write_text("#!/bin/sh\nexit 1\n")
    assert machine.install().returncode == 1
    assert machine.marks == set()


def test_another_python_than_the_environment_has_builds_it_again(machine: Machine) -> None:
    machine.add_python("python3", "3.12.1")
    assert machine.install().returncode == 0
    machine.add_python("python3.13", "3.13.0")
    done = machine.install(python="python3.13")
    assert done.returncode == 0, done.stderr
    assert "with python3.13" in done.stderr


def test_uv_is_used_where_it_is_installed(machine: Machine) -> None:
    python = machine.add_python("python3", "3.12.1", venv=False)
    machine.add_uv(python)
    done = machine.install()
    assert done.returncode == 0, done.stderr
    assert "uv pip install --python .venv/bin/python --no-deps --require-hashes" in machine.commands
    assert "-m pip" not in machine.commands
    assert machine.marks == {".installed-run"}


def test_uv_brings_a_python_where_there_is_none(machine: Machine) -> None:
    machine.add_uv(machine.add_python("hidden", "3.13.0"))
    machine.add_python("python3", "3.9.18")
    done = machine.install()
    assert done.returncode == 0, done.stderr
    assert "uv provides another" in done.stderr
    assert "--python >=3.11,<3.14 .venv" in machine.commands


def test_a_python_that_uv_cannot_provide_is_named_as_the_reason(machine: Machine) -> None:
    machine.add_uv(machine.add_python("python3", "3.10.13"), has_python=False)
    done = machine.install()
    assert done.returncode == 1
    assert "uv could not provide Python 3.11, 3.12 or 3.13. Check the network" in done.stderr
    assert "packages" not in done.stderr
    assert machine.marks == set()


def test_pip_takes_over_where_uv_fails(machine: Machine) -> None:
    """An index may be configured for pip only."""
    machine.add_uv(machine.add_python("python3", "3.12.1"), works=False)
    done = machine.install()
    assert done.returncode == 0, done.stderr
    assert "Trying pip" in done.stderr
    assert "-m pip --disable-pip-version-check" in machine.commands
    assert machine.marks == {".installed-run"}


@pytest.mark.parametrize(
    ("goal", "level"), [("serve", "run"), ("dist", "run"), ("test", "dev"), ("check", "dev")]
)
def test_a_goal_installs_no_more_than_it_needs(machine: Machine, goal: str, level: str) -> None:
    for name in ("Makefile", "pyproject.toml", "hatch_build.py"):
        shutil.copy(ROOT / name, machine.clone)
    planned = subprocess.run(
        ["make", "--dry-run", goal], cwd=machine.clone, capture_output=True, text=True, check=True
    ).stdout
    assert f"tools/install.sh {level}\n" in planned


def test_an_interpreter_whose_path_has_a_space_can_be_named(machine: Machine) -> None:
    named = machine.add_python("my python", "3.12.1")
    assert machine.install(python=str(named)).returncode == 0


def test_an_unknown_level_is_refused(machine: Machine) -> None:
    done = machine.install("everything")
    assert done.returncode == 1
    assert "takes run or dev, not everything" in done.stderr
