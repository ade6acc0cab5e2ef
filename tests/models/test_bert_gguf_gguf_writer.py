from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from rekindle.models.bert_gguf import Field, Tensor, write_gguf
from rekindle.models.gguf import check_gguf


def test_fields_and_tensors_come_back_as_they_were(tmp_path: Path) -> None:
    fields: dict[str, Field] = {
        "general.architecture": "bert",
        "a.number": 7,
        "a.fraction": 0.5,
        "a.flag": False,
        "some.texts": ["a", "", "\u2581\u00e9"],
        "some.numbers": [1, -2, 3],
    }
    tensors: dict[str, Tensor] = {
        "odd": np.arange(5, dtype=np.float32),
        "half": np.arange(6, dtype=np.float16).reshape(2, 3),
        "turned": np.arange(6, dtype=np.float32).reshape(3, 2).T,
    }
    written: list[int] = []
    write_gguf(tmp_path / "a.gguf", fields, tensors, written.append)
    check_gguf(tmp_path / "a.gguf")
    reader = gguf.GGUFReader(tmp_path / "a.gguf")
    assert {name: reader.fields[name].contents() for name in fields} == fields
    assert [each.name for each in reader.tensors] == list(tensors)
    for found, tensor in zip(reader.tensors, tensors.values(), strict=True):
        assert np.array_equal(found.data, tensor)
        assert found.data.dtype == tensor.dtype
    assert sum(written) <= (tmp_path / "a.gguf").stat().st_size
