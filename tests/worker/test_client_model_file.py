"""What is known of a model's file from outside."""

from __future__ import annotations

from pathlib import Path

from rekindle.worker.client import ModelFile


def test_a_file_has_its_suffix_and_its_size(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"12345")
    found = ModelFile.at(path)
    assert (found.format, found.size_bytes) == ("gguf", 5)
    assert found.modified_s == path.stat().st_mtime


def test_a_folder_has_those_of_its_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"{}")
    (tmp_path / "model.safetensors").write_bytes(b"12345")
    found = ModelFile.at(tmp_path)
    assert (found.format, found.size_bytes) == ("safetensors", 7)


def test_a_file_that_is_gone_is_told_without_a_size(tmp_path: Path) -> None:
    found = ModelFile.at(tmp_path / "model.gguf")
    assert (found.format, found.size_bytes, found.modified_s) == ("gguf", 0, 0.0)
