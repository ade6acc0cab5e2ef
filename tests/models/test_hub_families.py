"""A short name is pulled in the quantisation that fits into the memory of this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from rekindle.errors import ModelError
from rekindle.models import hub as hub_module
from rekindle.models.pull import pull

from .fake_hub import FakeHub
from .tiny import RecordedProgress, gguf_bytes

REPO = "unsloth/Qwen3-8B-GGUF"
#: Rows of each tiny file, so that the sizes are in the order of the real ones.
ROWS = {"Q2_K": 8, "Q4_K_M": 64, "Q8_0": 256}


@pytest.fixture
def sizes(hub: FakeHub, tmp_path: Path) -> dict[str, int]:
    """Offer a model in three quantisations. Returns their sizes in bytes."""
    content = {quant: gguf_bytes(tmp_path, rows=rows) for quant, rows in ROWS.items()}
    hub.repos[REPO] = {f"Qwen3-8B-{quant}.gguf": each for quant, each in content.items()}
    hub.repos[REPO]["imatrix.gguf"] = b"x"
    hub.licence = "apache-2.0"
    return {quant: len(each) for quant, each in content.items()}


def free(monkeypatch: pytest.MonkeyPatch, size_bytes: int) -> None:
    monkeypatch.setattr(hub_module, "host_free_bytes", lambda: size_bytes)


def test_the_usual_quantisation_is_pulled_with_its_reason_size_and_licence(
    sizes: dict[str, int],
    models_dir: Path,
    progress: RecordedProgress,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All of it is read from the hub."""
    free(monkeypatch, 8_000_000_000)
    path = pull("qwen3", models_dir=models_dir, progress=progress)
    assert path == models_dir / "hub" / REPO / "Qwen3-8B-Q4_K_M.gguf"
    [line] = progress.lines
    assert line == (
        "qwen3:8b is unsloth/Qwen3-8B-GGUF, Qwen3-8B-Q4_K_M.gguf: "
        f"{sizes['Q4_K_M'] / 1000:.1f} kB, licence apache-2.0. Q4_K_M is the usual balance of "
        "quality and size. It fits the 8.0 GB of memory that this machine has free."
    )


def test_a_smaller_quantisation_is_pulled_where_the_usual_one_leaves_no_room(
    sizes: dict[str, int],
    models_dir: Path,
    progress: RecordedProgress,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A quarter of the memory is left for the KV cache."""
    free(monkeypatch, sizes["Q4_K_M"] * 4 // 3 - 1)
    assert pull("qwen3", models_dir=models_dir, progress=progress).name == "Qwen3-8B-Q2_K.gguf"
    assert "so Q2_K was chosen" in progress.lines[0]


def test_a_model_that_does_not_fit_names_smaller_ones_and_how_to_pull_it_anyway(
    hub: FakeHub,
    sizes: dict[str, int],
    models_dir: Path,
    progress: RecordedProgress,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free(monkeypatch, sizes["Q2_K"])
    with pytest.raises(ModelError, match=r"too large .*\(qwen3:4b, qwen3:1\.7b, .*Q2_K\.gguf"):
        pull("qwen3", models_dir=models_dir, progress=progress)
    assert not hub.downloads
    path = pull("qwen3:8b-q8_0", models_dir=models_dir, progress=progress)
    assert path.name == "Qwen3-8B-Q8_0.gguf"


def test_a_pulled_model_is_found_again_without_the_hub_whatever_is_free(
    hub: FakeHub,
    sizes: dict[str, int],
    models_dir: Path,
    progress: RecordedProgress,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server that is running takes memory, and must not make the name mean another file."""
    free(monkeypatch, sizes["Q4_K_M"])
    path = pull("qwen3:8b", models_dir=models_dir, progress=progress)
    asked = len(hub.asked)
    for size_bytes in (0, 8_000_000_000):
        free(monkeypatch, size_bytes)
        assert pull("qwen3", models_dir=models_dir, progress=progress) == path
    assert len(hub.asked) == asked


def test_a_repository_with_a_single_file_of_another_kind_is_pulled(
    hub: FakeHub, models_dir: Path, progress: RecordedProgress, tmp_path: Path
) -> None:
    hub.repos["ggml-org/gpt-oss-20b-GGUF"] = {"gpt-oss-20b-new.gguf": gguf_bytes(tmp_path)}
    path = pull("gpt-oss", models_dir=models_dir, progress=progress)
    assert path.name == "gpt-oss-20b-new.gguf"
    assert "no licence stated" in progress.lines[0]


def test_a_hub_id_is_introduced_too(
    hub: FakeHub, models_dir: Path, progress: RecordedProgress, tmp_path: Path
) -> None:
    hub.repos["org/repo"] = {"m-Q8_0.gguf": gguf_bytes(tmp_path)}
    hub.licence = "mit"
    pull("org/repo", models_dir=models_dir, progress=progress)
    assert progress.lines[0].startswith("Pulling org/repo, m-Q8_0.gguf: ")
    assert progress.lines[0].endswith("licence mit.")
