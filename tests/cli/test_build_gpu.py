"""Builds a library with the real script from small sources, and serves with it."""

from __future__ import annotations

import io
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import rekindle.memory
from rekindle.cli import build_gpu
from rekindle.cli.build_gpu import BuildFailed, BuildOptions
from rekindle.config import load_config
from rekindle.engine.llamacpp import bindings
from rekindle.errors import ConfigError
from rekindle.protocol.settings import GB
from tests.support.server import running

#: A project with the targets of llama.cpp, whose "compiler" copies a library.
COPIES = """
cmake_minimum_required(VERSION 3.14)
project(imitation CXX)
add_custom_target(mtmd ALL COMMAND ${{CMAKE_COMMAND}} -E copy {library} bin/libmtmd.so)
"""
FAILS = """
cmake_minimum_required(VERSION 3.14)
project(imitation CXX)
message(SEND_ERROR "the sources are broken")
foreach(number RANGE 50)
  message(STATUS "line after the error")
endforeach()
"""

needs_tools = pytest.mark.skipif(
    not (shutil.which("cmake") and shutil.which("c++")), reason="needs CMake and a compiler"
)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folders, and a current folder without settings."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=200)


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def sources(folder: Path, text: str) -> Path:
    (folder / "ggml").mkdir(parents=True)
    (folder / "ggml" / "CMakeLists.txt").touch()
    (folder / "CMakeLists.txt").write_text(text.format(library=bindings.library_path()))
    return folder


def options(home: Path, text: str = COPIES, **changes: Any) -> BuildOptions:
    out = build_gpu.default_folder("cpu")
    return replace(
        BuildOptions(kind="cpu", source=sources(home / "sources", text), out=out, jobs=1), **changes
    )


@needs_tools
def test_a_built_library_is_tried_remembered_and_served_with(
    home: Path, console: Console, smollm2_path: Path
) -> None:
    """No environment variable is needed afterwards."""
    library = build_gpu.build_gpu(options(home), console)
    assert library.is_relative_to(home / "data")
    assert load_config({}).llama_lib == library
    assert "100%" in printed(console)
    with running(smollm2_path, home) as server:
        [worker] = server.worker_pids()
        assert str(library) in Path(f"/proc/{worker}/maps").read_text()


@needs_tools
def test_a_library_without_a_gpu_is_not_remembered(home: Path, console: Console) -> None:
    """It would be no faster than the installed one."""
    with pytest.raises(BuildFailed, match="finds no GPU, so it is not used"):
        build_gpu.build_gpu(options(home, kind="metal"), console)
    assert load_config({}).llama_lib is None


@needs_tools
def test_a_failed_build_shows_its_error_and_names_its_log(home: Path, console: Console) -> None:
    given = options(home, FAILS)
    with pytest.raises(BuildFailed, match=r"could not be compiled.*build\.log") as raised:
        build_gpu.build_gpu(given, console)
    assert "the sources are broken" in str(raised.value)
    assert "the sources are broken" in (given.out / "build.log").read_text()
    assert load_config({}).llama_lib is None


def test_the_reason_of_an_error_is_shown_although_blank_lines_come_before_it() -> None:
    lines = ["-- checked", "CMake Error: the compiler is broken", *[""] * 20, "nvcc fatal: why"]
    assert build_gpu._first_error(lines) == [lines[1], lines[-1]]


def test_a_broken_settings_file_is_reported_before_the_build(home: Path, console: Console) -> None:
    file = home / "config" / "rekindle" / "rekindle.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("prot: 9000\n")
    given = options(home)
    with pytest.raises(ConfigError, match="unknown setting `prot`"):
        build_gpu.build_gpu(given, console)
    assert not given.out.exists()


def test_a_file_that_is_no_library_cannot_be_used(tmp_path: Path) -> None:
    library = tmp_path / "libmtmd.so"
    library.write_text("text")
    with pytest.raises(BuildFailed, match=r"cannot be used: .*run `rekindle build-gpu` again"):
        build_gpu.probe(library)


def test_everything_that_is_missing_is_said_before_anything_is_done(
    home: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(home))
    monkeypatch.setattr(build_gpu, "CUDA_FOLDERS", ())
    monkeypatch.setattr(build_gpu, "machine_gpus", list)
    given = options(home, kind="cuda")
    with pytest.raises(BuildFailed, match="cannot start"):
        build_gpu.build_gpu(given, console)
    for said in ("C++ compiler", "program cmake", "program nvcc", "No NVIDIA driver answers"):
        assert f"{said}" in printed(console)
    assert not given.out.exists()


def sentence(home: Path, **changes: Any) -> str:
    return " ".join(each.sentence for each in build_gpu.checks(options(home, **changes)))


def test_a_named_architecture_needs_no_driver(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a machine without a GPU can build for another one."""
    monkeypatch.setattr(build_gpu, "machine_gpus", list)
    assert "shows no GPU. The build is for cuda" in sentence(home, kind="cuda", arch="90")


def test_compilers_are_as_many_as_the_memory_allows(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rekindle.memory, "host_free_bytes", lambda: 3 * GB)
    monkeypatch.setattr(build_gpu, "usable_cores", lambda: 16)
    given = options(home, jobs=None)
    found = [each.sentence for each in build_gpu.checks(given)]
    assert "3 compilers at a time need 3 GB of memory, and 3.0 GB is free." in found
    [short] = [
        each for each in build_gpu.checks(replace(given, jobs=8)) if "compilers at" in each.sentence
    ]
    assert not short.ok
    assert short.sentence.endswith("Lower --jobs.")


def test_a_machine_without_a_gpu_is_asked_what_to_build_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(build_gpu, "machine_gpus", list)
    with pytest.raises(BuildFailed, match=r"shows no GPU.*rekindle build-gpu cuda"):
        build_gpu.default_kind()
    monkeypatch.setattr(build_gpu, "machine_gpus", lambda: ["AMD GPU"])
    assert build_gpu.default_kind() == "vulkan"
    monkeypatch.setattr(build_gpu, "machine_gpus", lambda: ["NVIDIA L4"])
    assert build_gpu.default_kind() == "cuda"


def test_the_settings_keep_their_other_lines(home: Path, console: Console) -> None:
    file = home / "config" / "rekindle" / "rekindle.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("# mine\nport: 9000\nllama-lib: /old.so\nexact: true")
    library = home / "a: b" / "libmtmd.so"
    build_gpu.remember(library, console)
    assert file.read_text().startswith("# mine\nport: 9000\nexact: true\nllama_lib: ")
    config = load_config({})
    assert (config.port, config.exact, config.llama_lib) == (9000, True, library)


def test_another_settings_file_that_is_read_instead_is_named(home: Path, console: Console) -> None:
    (home / "rekindle.yaml").write_text("port: 9000\n")
    build_gpu.remember(home / "libmtmd.so", console)
    assert f"{home / 'rekindle.yaml'} is read instead of that file" in printed(console)


def test_the_sources_are_those_of_the_installed_library() -> None:
    pinned = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert f'"{build_gpu.probe(None).source}"' in pinned
    assert os.environ.get("REKINDLE_LLAMA_LIB") or not build_gpu.probe(None).gpus
