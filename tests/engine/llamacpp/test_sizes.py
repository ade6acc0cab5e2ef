"""What makes states interchangeable: every byte of the model, whatever files it is in."""

from __future__ import annotations

from pathlib import Path

from blake3 import blake3

from rekindle.engine.llamacpp.sizes import STATE_FORMAT, state_fingerprint


def write_split(folder: Path, *parts: bytes) -> Path:
    folder.mkdir()
    for number, part in enumerate(parts, start=1):
        (folder / f"m-{number:05}-of-{len(parts):05}.gguf").write_bytes(part)
    return folder / f"m-00001-of-{len(parts):05}.gguf"


def test_splits_that_differ_in_a_later_file_alone_are_other_models(tmp_path: Path) -> None:
    one = write_split(tmp_path / "one", b"metadata", b"weights")
    other = write_split(tmp_path / "other", b"metadata", b"tuned weights")
    same = write_split(tmp_path / "same", b"metadata", b"weights")
    assert state_fingerprint(one, "f16") == state_fingerprint(same, "f16")
    assert state_fingerprint(one, "f16") != state_fingerprint(other, "f16")


def test_another_kv_type_is_another_state(tmp_path: Path) -> None:
    path = write_split(tmp_path / "one", b"metadata", b"weights")
    assert state_fingerprint(path, "f16") != state_fingerprint(path, "q8_0")


def test_a_model_in_one_file_keeps_the_fingerprint_it_had(tmp_path: Path) -> None:
    """Cache folders are found by it."""
    path = tmp_path / "whole.gguf"
    path.write_bytes(b"a model")
    expected = blake3((STATE_FORMAT + "f16").encode() + blake3(b"a model").digest()).digest()
    assert state_fingerprint(path, "f16") == expected
