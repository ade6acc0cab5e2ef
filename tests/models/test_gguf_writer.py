"""Fields and tensors of a written file come back, and its size is known before."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from rekindle.models.bert_gguf import Tensor, gguf_tensor
from rekindle.models.gguf import check_gguf
from rekindle.models.gguf_writer import Field, GgufTensor, file_bytes, write_gguf


def test_fields_and_tensors_come_back_as_they_were(tmp_path: Path) -> None:
    fields: dict[str, Field] = {
        "general.architecture": "bert",
        "a.number": 7,
        "a.fraction": 0.5,
        "a.flag": False,
        "some.texts": ["a", "", "\u2581\u00e9"],
        "some.numbers": [1, -2, 3],
        "some.fractions": [0.5, -1.0],
        "some.flags": [True, False],
    }
    tensors: dict[str, Tensor] = {
        "odd": np.arange(5, dtype=np.float32),
        "half": np.arange(6, dtype=np.float16).reshape(2, 3),
        "turned": np.arange(6, dtype=np.float32).reshape(3, 2).T,
    }
    written: list[int] = []
    described = [gguf_tensor(*each) for each in tensors.items()]
    write_gguf(tmp_path / "a.gguf", fields, described, written.append)
    check_gguf(tmp_path / "a.gguf")
    reader = gguf.GGUFReader(tmp_path / "a.gguf")
    assert {name: reader.fields[name].contents() for name in fields} == fields
    assert [each.name for each in reader.tensors] == list(tensors)
    for found, tensor in zip(reader.tensors, tensors.values(), strict=True):
        assert np.array_equal(found.data, tensor)
        assert found.data.dtype == tensor.dtype
    assert file_bytes(fields, described) == (tmp_path / "a.gguf").stat().st_size
    assert sum(written) <= file_bytes(fields, described)


def test_a_tensor_with_other_bytes_than_it_describes_is_an_error(tmp_path: Path) -> None:
    short = GgufTensor("short", (4,), 0, lambda: iter([bytes(8)]))
    with pytest.raises(ValueError, match="short has 8 bytes, not 16"):
        write_gguf(tmp_path / "a.gguf", {"general.architecture": "llama"}, [short])
