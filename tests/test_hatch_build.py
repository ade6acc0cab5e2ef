"""The package contains compiled code if there is a C compiler, and is pure Python otherwise."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging import tags

ROOT = Path(__file__).parents[1]
FILES = ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE")
LIBRARY = "rekindle/engine/sampling/_rows.so"
BROKEN = "sh -c 'exit 1'"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The files of the repository that a build needs."""
    engine = tmp_path / "src/rekindle/engine/sampling"
    engine.mkdir(parents=True)
    for source in (ROOT / "src/rekindle/engine/sampling").glob("*.[ch]"):
        shutil.copy(source, engine)
    for name in FILES:
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def build(tree: Path, compiler: str, *, target: str = "wheel") -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", target]
    environment = {**os.environ, "CC": compiler}
    subprocess.run(command, cwd=tree, env=environment, check=True, capture_output=True)
    [built] = (tree / "dist").iterdir()
    return built


def names(wheel: Path) -> list[str]:
    with ZipFile(wheel) as files:
        return files.namelist()


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_a_wheel_with_compiled_code_is_for_this_platform(tree: Path) -> None:
    wheel = build(tree, "cc")
    assert names(wheel).count(LIBRARY) == 1
    assert not (tree / "src" / LIBRARY).exists()
    [tag] = tags.parse_tag(wheel.stem.split("-", 2)[2])
    assert tag in set(tags.sys_tags())
    assert sys.platform != "linux" or re.match(r"manylinux_2_\d+_", tag.platform)


@pytest.mark.parametrize("compiler", ["no-such-compiler", BROKEN])
def test_a_wheel_without_a_compiler_is_for_all_platforms_and_leaves_the_tree_unchanged(
    tree: Path, compiler: str
) -> None:
    (tree / "src" / LIBRARY).write_bytes(b"of an editable install")
    wheel = build(tree, compiler)
    assert LIBRARY not in names(wheel)
    assert wheel.stem.endswith("-py3-none-any")
    assert (tree / "src" / LIBRARY).read_bytes() == b"of an editable install"


def test_a_pure_wheel_can_be_asked_for(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REKINDLE_PURE_WHEEL", "1")
    wheel = build(tree, "cc")
    assert LIBRARY not in names(wheel)
    assert wheel.stem.endswith("-py3-none-any")


def test_compiling_in_place_without_a_compiler_fails_and_keeps_the_old_library(tree: Path) -> None:
    (tree / "src" / LIBRARY).write_bytes(b"old")
    command = [sys.executable, "-S", "hatch_build.py"]  # without any package
    environment = {**os.environ, "CC": BROKEN}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert "cannot compile the sampler" in done.stderr
    assert (tree / "src" / LIBRARY).read_bytes() == b"old"


def test_a_source_package_has_the_sources_and_no_compiled_code(tree: Path) -> None:
    (tree / "src" / LIBRARY).write_bytes(b"old")
    source = build(tree, "cc", target="sdist")
    shutil.unpack_archive(source, tree / "unpacked", filter="data")
    [unpacked] = (tree / "unpacked").iterdir()
    assert (unpacked / "hatch_build.py").exists()
    sources = {each.name for each in (unpacked / "src/rekindle/engine/sampling").iterdir()}
    assert sources == {"rows.c", "rows.h", "row_pool.c", "weights.h"}
