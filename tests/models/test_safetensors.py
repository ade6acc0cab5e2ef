"""The header of a safetensors file is checked before it is used."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from rekindle.errors import ModelError
from rekindle.models.safetensors import tensor_names
from tests.support.rounds import rounds

WHOLE = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


def write(path: Path, header: Any, data_bytes: int = 24) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(data_bytes))
    return path


def test_the_tensors_of_a_valid_file_are_listed(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tensors: dict[str, np.ndarray[Any, Any]] = {
        "a": np.zeros((2, 3), np.float32),
        "b": np.zeros(5, np.uint8),
    }
    save_file(tensors, path, {"format": "mlx"})
    assert sorted(tensor_names(path)) == ["a", "b"]


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ({"a": WHOLE | {"data_offsets": [0, 28]}}, "beyond its end"),
        ({"a": WHOLE | {"data_offsets": [24, 0]}}, "beyond its end"),
        ({"a": WHOLE | {"data_offsets": [-24, 0]}}, "no offsets"),
        ({"a": WHOLE | {"data_offsets": [0]}}, "no offsets"),
        ({"a": WHOLE | {"data_offsets": None}}, "no offsets"),
        ({"a": WHOLE | {"shape": [2, 4]}}, "as large as its shape"),
        ({"a": WHOLE | {"shape": [1 << 62, 1 << 62]}}, "as large as its shape"),
        ({"a": WHOLE | {"shape": [1 << 64, 0]}}, "no shape"),
        ({"a": WHOLE | {"shape": [True, 6]}}, "no shape"),
        ({"a": WHOLE | {"shape": [1] * 9}}, "beyond its end"),
        ({"a": WHOLE | {"dtype": "F33"}}, "unknown type"),
        ({"a": WHOLE | {"dtype": {}}}, "unknown type"),
        ({"a": []}, "not described"),
        ({"a": WHOLE, "b": WHOLE}, "overlap"),
        ([], "not a JSON object"),
        (b"{", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"\xff\xfe", "not JSON"),
    ],
)
def test_an_inconsistent_header_is_refused_with_the_reason(
    tmp_path: Path, header: Any, reason: str
) -> None:
    with pytest.raises(ModelError, match=f"{reason}.*fetch it again"):
        tensor_names(write(tmp_path / "model.safetensors", header))


@pytest.mark.parametrize("start", [b"", b"\xff" * 8, (1 << 40).to_bytes(8, "little") + b"{}"])
def test_a_header_beyond_the_end_of_the_file_is_refused(tmp_path: Path, start: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(start)
    with pytest.raises(ModelError, match="header is longer"):
        tensor_names(path)


def test_a_git_lfs_pointer_is_named_as_such(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(ModelError, match="git lfs pull"):
        tensor_names(path)


def test_a_path_that_is_not_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no model file"):
        tensor_names(tmp_path)


@pytest.mark.long
def test_a_changed_file_is_read_or_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "model.safetensors", {"a": WHOLE, "__metadata__": {"format": "mlx"}})
    whole = path.read_bytes()
    random = np.random.default_rng(0)
    for _ in range(rounds(300, 20_000)):
        changed = bytearray(whole)
        for place in random.integers(0, len(whole), random.integers(1, 4)):
            changed[place] = random.integers(0, 256)
        path.write_bytes(changed[: random.integers(0, len(whole) + 1) or None])
        with suppress(ModelError):
            assert len(tensor_names(path)) <= 2
