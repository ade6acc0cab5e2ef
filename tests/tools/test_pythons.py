"""Tests which interpreters `make pythons` uses."""

from __future__ import annotations

import os
import sys
import tomllib
from pathlib import Path

import pytest

from tools import pythons


def test_it_knows_every_python_that_the_project_supports() -> None:
    project = tomllib.loads((pythons.ROOT / "pyproject.toml").read_text())["project"]
    first, last = (part.strip("<>=") for part in project["requires-python"].split(","))
    minors = range(int(first.split(".")[1]), int(last.split(".")[1]))
    assert tuple(f"3.{minor}" for minor in minors) == pythons.SUPPORTED


def test_an_interpreter_of_pyenv_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interpreter = tmp_path / "versions" / "3.12.9" / "bin" / "python"
    interpreter.parent.mkdir(parents=True)
    interpreter.touch()
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    assert str(interpreter) in pythons.candidates("3.12")
    assert str(interpreter) not in pythons.candidates("3.13")


def test_an_interpreter_on_the_path_is_found_behind_a_shim_that_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    shim, interpreter = (tmp_path / folder / f"python{version}" for folder in ("shims", "bin"))
    for path in (shim, interpreter):
        path.parent.mkdir()
    shim.write_text("#!/bin/sh\nexit 127\n")
    shim.chmod(0o755)
    interpreter.symlink_to(sys.executable)
    folders = (tmp_path / "empty", shim.parent, interpreter.parent)
    monkeypatch.setenv("PATH", os.pathsep.join(map(str, folders)))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    working = [each for each in pythons.candidates(version) if pythons.works(each, version)]
    assert working == [str(interpreter)]


def test_only_an_interpreter_that_runs_and_has_the_version_works(tmp_path: Path) -> None:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    shim = tmp_path / "python"
    shim.write_text("#!/bin/sh\nexit 127\n")
    shim.chmod(0o755)
    assert pythons.works(sys.executable, version)
    assert not pythons.works(sys.executable, "3.99")
    assert not pythons.works(str(shim), version)
    assert not pythons.works(str(tmp_path / "missing"), version)
    shim.write_bytes(b"\0\0 not a program of this machine")
    assert not pythons.works(str(shim), version)
