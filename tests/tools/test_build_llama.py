"""Runs the build script of llama.cpp up to the compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "build-llama.sh"
WAIT_S = 60


def run(*arguments: str | Path, path: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **({} if path is None else {"PATH": path})}
    command = ["/bin/bash", str(SCRIPT), *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=WAIT_S, env=environment, check=False
    )


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A small imitation of the source archive."""
    llama = tmp_path / "xllamacpp-1" / "thirdparty" / "llama.cpp"
    kept = ["CMakeLists.txt", "ggml/CMakeLists.txt", "src/llama.cpp", "scripts/ui-assets.cmake"]
    kept += ["tools/CMakeLists.txt", "tools/server/server.cpp", "tools/mtmd/models/a.cpp"]
    for name in [*kept, "models/big.gguf", "ggml/src/ggml-sycl/x.cpp", "docs/page.md"]:
        (llama / name).parent.mkdir(parents=True, exist_ok=True)
        (llama / name).write_text("project(fails)")
    for name in ("LICENSE", "licenses", "cmake", "include", "common", "vendor"):
        (llama / name).mkdir(exist_ok=True)
    (llama / "scripts" / "build-info.sh").touch()
    return tmp_path / "xllamacpp-1"


def test_a_pack_contains_only_the_files_that_a_build_reads(sources: Path, tmp_path: Path) -> None:
    pack = tmp_path / "new" / "llama.tar.gz"
    done = run("--source", sources, "--pack", pack)
    assert done.returncode == 0, done.stderr
    with tarfile.open(pack) as archive:
        names = set(archive.getnames())
    assert {"llama.cpp/CMakeLists.txt", "llama.cpp/tools/mtmd/models/a.cpp"} <= names
    assert not [name for name in names if "sycl" in name or "docs" in name or "big" in name]


def test_a_pack_can_be_used_as_source(sources: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "one.tar.gz", tmp_path / "two.tar.gz"
    assert run("--source", sources, "--pack", first).returncode == 0
    assert run("--source", first, "--pack", second).returncode == 0
    with tarfile.open(first) as one, tarfile.open(second) as two:
        assert one.getnames() == two.getnames()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--quantum"], "unknown option --quantum"),
        (["--arch"], "--arch takes a value"),
        (["--source", "/not/there"], "there is no /not/there"),
        (["--source", str(SCRIPT)], "cannot be unpacked"),
        (["--source", str(SCRIPT.parent)], "holds no llama.cpp"),
    ],
)
def test_impossible_requests_are_explained(arguments: list[str], reason: str) -> None:
    done = run(*arguments)
    assert done.returncode != 0
    assert reason in done.stderr


def test_a_missing_compiler_is_reported_with_a_remedy(sources: Path, tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("find", "mktemp", "dirname", "uname", "getconf", "rm", "mkdir"):
        (tools / name).symlink_to(shutil.which(name) or name)
    (tools / "cmake").touch(0o755)
    done = run("--cuda", "--source", sources, "--out", tmp_path / "out", path=str(tools))
    assert done.returncode != 0
    assert "needs nvcc" in done.stderr
    assert "--vulkan" in done.stderr


GRAPHS = """
            const bool properties_changed = ggml_cuda_graph_update_required(cuda_ctx, cgraph);
                if (!properties_changed) {
                }
        if (graph->instance == nullptr) { // Create executable graph from captured graph.
        }
        if (cuda_graph_update_required) { // Update graph executable
        }
"""


def configure_cuda(sources: Path, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """Configure a build from an archive, with tools that do nothing."""
    archive, tools = tmp_path / "pack.tar.gz", tmp_path / "bin"
    assert run("--source", sources, "--pack", archive).returncode == 0
    tools.mkdir()
    for name in ("cmake", "nvcc"):
        (tools / name).write_text("#!/bin/sh\n")
        (tools / name).chmod(0o755)
    out, path = tmp_path / "out", f"{tools}:{os.environ['PATH']}"
    return run("--cuda", "--configure", "--source", archive, "--out", out, path=path)


def test_cuda_graphs_are_rebuilt_instead_of_updated(sources: Path, tmp_path: Path) -> None:
    source = "ggml/src/ggml-cuda/ggml-cuda.cu"
    written = sources / "thirdparty/llama.cpp" / source
    written.parent.mkdir(parents=True)
    written.write_text(GRAPHS)
    written.with_name("common.cuh").write_text("    bool warmup_complete = false;\n")
    done = configure_cuda(sources, tmp_path)
    assert done.returncode == 0, done.stderr
    mended = (tmp_path / "out" / "source" / source).read_text()
    fields = (tmp_path / "out" / "source" / source).with_name("common.cuh").read_text()
    assert "int calls_alike = 0;" in fields
    assert "if (graph->calls_alike >= 16) {" in mended
    assert "cudaGraphExecDestroy(graph->instance)" in mended
    assert "if (cuda_graph_update_required) {" not in mended


def test_sources_that_cannot_be_patched_are_not_built(sources: Path, tmp_path: Path) -> None:
    written = sources / "thirdparty/llama.cpp/ggml/src/ggml-cuda/ggml-cuda.cu"
    written.parent.mkdir(parents=True)
    written.write_text("another version")
    written.with_name("common.cuh").write_text("another version")
    done = configure_cuda(sources, tmp_path)
    assert done.returncode != 0
    assert "could not be patched" in done.stderr
