"""Builds what is published, installs it into clean environments and serves from there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from zipfile import ZipFile

import pytest

from rekindle.version import __version__
from tests.support.rounds import LONG
from tests.support.server import ROOT, running
from tools import dist, pythons

SAMPLER = "rekindle/engine/sampling/_rows.so"
UV = str(Path(sys.executable).with_name("uv"))
WAIT_S = 600
MAX_INSTALLED_MB = 450

Word = str | Path
Install = Callable[[str, Path, Path], Path]  # takes interpreter, wheel and folder

needs_minutes = pytest.mark.skipif(not LONG, reason="downloads packages; `make stress` runs it")
pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The files that `make dist` makes, by their kind."""
    files = dist.build(ROOT, tmp_path_factory.mktemp("built") / "dist")
    kinds = {"-none-any.whl": "pure", ".whl": "platform", ".tar.gz": "source", "SUMS": "checksums"}
    return {
        next(kind for end, kind in kinds.items() if file.name.endswith(end)): file for file in files
    }


def run(*command: Word, folder: Path, **variables: str) -> str:
    """Run a command outside of the project, and return what it prints."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def asks(rekindle: Path, folder: Path, model: Path | str, **variables: str) -> str:
    """Serve with an installed command, and return the answer to a question."""
    question = {"messages": [{"role": "user", "content": "What is gravity?"}], "max_tokens": 8}
    with (
        running(model, folder, environment=variables, command=(str(rekindle), "serve")) as server,
        server.client() as client,
    ):
        answer = client.post("/v1/chat/completions", json=question).raise_for_status().json()
    text: str = answer["choices"][0]["message"]["content"]
    return text


def test_both_wheels_the_source_archive_and_checksums_are_built(built: dict[str, Path]) -> None:
    assert set(built) == {"platform", "pure", "source", "checksums"}
    with ZipFile(built["platform"]) as platform, ZipFile(built["pure"]) as pure:
        assert set(platform.namelist()) - set(pure.namelist()) == {SAMPLER}
        assert "rekindle/__main__.py" in pure.namelist()
    for line in built["checksums"].read_text().splitlines():
        digest, name = line.split()
        assert sha256((built["checksums"].parent / name).read_bytes()).hexdigest() == digest


def test_a_wheel_can_be_built_from_the_source_archive(
    built: dict[str, Path], tmp_path: Path
) -> None:
    shutil.unpack_archive(built["source"], tmp_path, filter="data")
    [source] = tmp_path.iterdir()
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", folder=source)
    [wheel] = (source / "dist").iterdir()
    assert wheel.name == built["platform"].name
    with ZipFile(wheel) as ours, ZipFile(built["platform"]) as theirs:
        assert ours.namelist() == theirs.namelist()


@pytest.fixture
def environment(built: dict[str, Path], tmp_path: Path) -> Path:
    """An environment with the wheel alone. It finds the wheel's dependencies where the tests do.

    Python reads no .pth file in that folder, so the project's own sources stay out.
    """
    made = tmp_path / "environment"
    run(UV, "venv", "--quiet", "--python", sys.executable, made, folder=tmp_path)
    python = made / "bin" / "python"
    installing: list[Word] = [
        UV,
        "pip",
        "install",
        "--quiet",
        "--offline",
        "--no-deps",
        "--python",
        python,
    ]
    run(*installing, built["platform"], folder=tmp_path)
    site = run(python, "-c", "import site; print(site.getsitepackages()[0])", folder=tmp_path)
    Path(site.strip(), "dependencies.pth").write_text(f"{Path(pytest.__file__).parents[1]}\n")
    return made


def test_an_installed_wheel_serves_with_its_own_files_and_sampler(
    environment: Path, tmp_path: Path, smollm2_path: Path
) -> None:
    code = "import rekindle; from rekindle.engine.sampling import native; print(native.load())"
    python, rekindle = environment / "bin" / "python", environment / "bin" / "rekindle"
    assert str(environment) in run(python, "-c", code, folder=tmp_path)
    assert asks(rekindle, tmp_path, smollm2_path)


def test_every_way_to_call_the_command_prints_the_version(
    environment: Path, tmp_path: Path
) -> None:
    bin_ = environment / "bin"
    ways: list[list[Word]] = [[bin_ / "rekindle"], [bin_ / "python", "-m", "rekindle"]]
    for way in ways:
        for flag in ("--version", "-V"):
            assert run(*way, flag, folder=tmp_path) == f"rekindle {__version__}\n"


def interpreter(version: str) -> str:
    candidates = (each for each in pythons.candidates(version) if pythons.works(each, version))
    found = next(candidates, None)
    return found or pytest.skip(f"this machine has no Python {version}")


def plain_venv(python: str, wheel: Path, folder: Path) -> Path:
    run(python, "-m", "venv", folder / "environment", folder=folder)
    run(folder / "environment/bin/python", "-m", "pip", "install", "-q", wheel, folder=folder)
    return folder / "environment/bin/rekindle"


def uv_venv(python: str, wheel: Path, folder: Path) -> Path:
    run(UV, "venv", "-q", "--python", python, folder / "environment", folder=folder)
    in_it = folder / "environment/bin/python"
    run(UV, "pip", "install", "-q", "--python", in_it, wheel, folder=folder)
    return folder / "environment/bin/rekindle"


def uv_tool(python: str, wheel: Path, folder: Path) -> Path:
    folders = {"UV_TOOL_DIR": str(folder / "tools"), "UV_TOOL_BIN_DIR": str(folder / "bin")}
    run(UV, "tool", "install", "-q", "--python", python, wheel, folder=folder, **folders)
    return folder / "bin/rekindle"


@pytest.mark.long
@needs_minutes
@pytest.mark.parametrize(
    ("version", "install"), [("3.11", plain_venv), ("3.12", uv_venv), ("3.13", uv_tool)]
)
def test_a_wheel_installs_anywhere_pulls_the_default_model_and_answers(
    built: dict[str, Path], tmp_path: Path, install: Install, version: str
) -> None:
    rekindle = install(interpreter(version), built["platform"], tmp_path)
    assert asks(rekindle, tmp_path, "smollm2", REKINDLE_MODELS_DIR=str(tmp_path / "models"))
    assert list((tmp_path / "models").glob("*.gguf"))


@pytest.mark.long
@needs_minutes
def test_a_fresh_clone_serves_after_one_command(tmp_path: Path, smollm2_path: Path) -> None:
    """It installs what a server needs and nothing else."""
    clone = tmp_path / "clone"
    run("git", "clone", "--quiet", ROOT, clone, folder=tmp_path)
    run("make", "install", folder=clone)
    assert asks(clone / ".venv/bin/rekindle", tmp_path, smollm2_path)
    assert not list(clone.glob(".venv/lib/python*/site-packages/pytest"))
    size = run("du", "-sm", clone / ".venv", folder=tmp_path).split()[0]
    assert int(size) < MAX_INSTALLED_MB
