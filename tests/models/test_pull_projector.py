from __future__ import annotations

from pathlib import Path

import pytest

from rekindle.errors import ModelError
from rekindle.models.catalogue import DEFAULT_MODEL, DEFAULT_VISION_MODEL
from rekindle.models.pull import find_projector, pull

from .fake_hub import FakeHub
from .tiny import RecordedProgress, gguf_bytes, write_gguf

REPO = "org/repo"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "mine"
    folder.mkdir()
    return folder


def found(folder: Path, model: str, *names: str, required: bool = False) -> str | None:
    for name in (model, *names):
        write_gguf(folder / name)
    path = find_projector(
        str(folder / model),
        folder / model,
        models_dir=folder / "models",
        progress=RecordedProgress(),
        required=required,
    )
    return path.name if path else None


def test_a_projector_next_to_its_model_is_found(folder: Path) -> None:
    assert found(folder, "eyes-Q4_K_M.gguf", "mmproj-f16.gguf") == "mmproj-f16.gguf"


def test_of_several_precisions_16_bits_are_preferred(folder: Path) -> None:
    names = ["mmproj-Q8_0.gguf", "mmproj-F32.gguf", "mmproj-BF16.gguf", "mmproj-F16.gguf"]
    assert found(folder, "eyes.gguf", *names) == "mmproj-F16.gguf"
    (folder / "mmproj-F16.gguf").unlink()
    assert found(folder, "eyes.gguf") == "mmproj-BF16.gguf"


def test_the_files_of_a_split_are_one_model(folder: Path) -> None:
    names = [f"eyes-0000{number}-of-00002.gguf" for number in (1, 2)]
    assert found(folder, *names, "mmproj-x.gguf") == "mmproj-x.gguf"


def test_among_several_models_the_name_decides(folder: Path) -> None:
    write_gguf(folder / "other-Q8_0.gguf")
    assert (
        found(folder, "eyes-2b-Q4_0.gguf", "mmproj-eyes-2B-f16.gguf") == "mmproj-eyes-2B-f16.gguf"
    )
    assert found(folder, "other-Q8_0.gguf") is None
    assert found(folder, "other-Q8_0.gguf", "eyes.mmproj-model-f16.gguf") is None


def test_required_takes_the_only_projector(folder: Path) -> None:
    write_gguf(folder / "other-Q8_0.gguf")
    assert found(folder, "eyes.gguf", "mmproj-f16.gguf") is None
    assert found(folder, "eyes.gguf", required=True) == "mmproj-f16.gguf"


def test_required_without_a_projector_gives_a_remedy(folder: Path) -> None:
    assert found(folder, "blind.gguf") is None
    with pytest.raises(ModelError, match="--mmproj, or omit --vlm"):
        found(folder, "blind.gguf", required=True)


def test_a_damaged_projector_is_refused(folder: Path) -> None:
    write_gguf(folder / "eyes.gguf")
    (folder / "mmproj-f16.gguf").write_bytes(b"GGUF but not really")
    with pytest.raises(ModelError, match=r"mmproj-f16\.gguf is not a usable GGUF"):
        found(folder, "eyes.gguf")


def test_one_catalogue_model_takes_images(folder: Path) -> None:
    write_gguf(folder / "mmproj-f16.gguf")
    for name, projector in ((DEFAULT_VISION_MODEL, "mmproj-shapes.gguf"), (DEFAULT_MODEL, None)):
        path = find_projector(
            name, folder / "x.gguf", models_dir=folder, progress=RecordedProgress()
        )
        assert (path.name if path else None) == projector


def hub_projector(models_dir: Path, *, required: bool = False) -> Path | None:
    progress = RecordedProgress()
    path = pull(REPO, models_dir=models_dir, progress=progress)
    return find_projector(REPO, path, models_dir=models_dir, progress=progress, required=required)


def test_a_pull_brings_the_projector_of_the_repository(
    hub: FakeHub, models_dir: Path, tmp_path: Path
) -> None:
    content = gguf_bytes(tmp_path)
    hub.repos[REPO] = {
        "q/m-Q4_K_M.gguf": content,
        "m-Q8_0.gguf": b"",
        "mmproj-F32.gguf": b"",
        "mmproj-F16.gguf": content,
    }
    assert hub_projector(models_dir) == models_dir / "hub" / REPO / "q" / "mmproj-F16.gguf"
    asked = len(hub.asked)
    assert hub_projector(models_dir, required=True) is not None
    assert len(hub.asked) == asked


def test_a_projector_missing_from_an_earlier_pull_is_fetched_on_demand(
    hub: FakeHub, models_dir: Path, tmp_path: Path
) -> None:
    content = gguf_bytes(tmp_path)
    hub.repos[REPO] = {"m-Q4_K_M.gguf": content}
    assert hub_projector(models_dir) is None
    hub.repos[REPO]["mmproj-F16.gguf"] = content
    assert hub_projector(models_dir) is None
    assert hub_projector(models_dir, required=True) is not None
    assert hub_projector(models_dir) is not None


def test_a_repository_without_one_says_so(hub: FakeHub, models_dir: Path, tmp_path: Path) -> None:
    hub.repos[REPO] = {"m-Q4_K_M.gguf": gguf_bytes(tmp_path)}
    with pytest.raises(ModelError, match="org/repo has no projector"):
        hub_projector(models_dir, required=True)
