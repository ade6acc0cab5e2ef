"""Converted weights have the values of the folder, in the type that was asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
import pytest

from rekindle.errors import ModelError
from rekindle.models import weights
from rekindle.models.conversion import convert
from tests.support.tiny_safetensors import write_tiny_folder, write_weights

from .tiny import RecordedProgress


def tensors(folder: Path, quant: str | None = None) -> dict[str, Any]:
    progress = RecordedProgress()
    path = convert(folder, models_dir=folder.parent / "models", progress=progress, quant=quant)
    return {each.name: each for each in gguf.GGUFReader(path).tensors}


def values(tensor: Any) -> np.ndarray[Any, Any]:
    return gguf.dequantize(tensor.data, tensor.tensor_type)


def stored(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    loaded: Any = mx.load(str(folder / "model.safetensors"))
    return {name: np.array(value.astype(mx.float32)) for name, value in loaded.items()}


@pytest.mark.parametrize(
    ("dtype", "kind"), [("float32", "F32"), ("float16", "F16"), ("bfloat16", "BF16")]
)
def test_matrices_keep_their_type_and_bits(dtype: str, kind: str, tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "tiny", "qwen3", dtype=dtype)
    found, expected = tensors(folder), stored(folder)
    down = found["blk.1.ffn_down.weight"]
    assert down.tensor_type.name == kind
    assert np.array_equal(values(down), expected["model.layers.1.mlp.down_proj.weight"])
    norm = found["blk.1.attn_norm.weight"]
    assert norm.tensor_type.name == "F32"
    assert np.array_equal(values(norm), expected["model.layers.1.input_layernorm.weight"])


def test_a_tensor_that_is_read_in_many_chunks_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tiny_folder(tmp_path / "tiny", "qwen3-moe", dtype="bfloat16")
    whole = {name: values(each) for name, each in tensors(folder, "q8_0").items()}
    for path in (tmp_path / "models" / "converted").iterdir():
        path.unlink()
    monkeypatch.setattr(weights, "CHUNK_BYTES", 1000)
    chunked = tensors(folder, "q8_0")
    assert all(np.array_equal(values(each), whole[name]) for name, each in chunked.items())


@pytest.mark.parametrize(("quant", "embedded"), [("q8_0", "Q8_0"), ("q4_0", "Q8_0")])
def test_quantised_matrices_are_close_and_the_rest_stays_exact(
    quant: str, embedded: str, tmp_path: Path
) -> None:
    folder = write_tiny_folder(tmp_path / "tiny", "qwen3-moe", intermediate_size=100)
    found = tensors(folder, quant)
    assert found["token_embd.weight"].tensor_type.name == embedded
    assert found["output.weight"].tensor_type.name == embedded
    assert found["blk.0.attn_q.weight"].tensor_type.name == quant.upper()
    assert found["blk.0.ffn_gate_inp.weight"].tensor_type.name == "F32"
    exact = stored(folder)["model.layers.0.self_attn.q_proj.weight"]
    steps = 2.0 ** (4 if quant == "q4_0" else 8)
    error = abs(values(found["blk.0.attn_q.weight"]) - exact).max()
    assert 0 < error < 3 * abs(exact).max() / steps


def test_rows_that_are_no_whole_blocks_stay_in_f16(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "tiny", "llama", intermediate_size=100)
    found = tensors(folder, "q4_0")
    assert found["blk.0.ffn_down.weight"].tensor_type.name == "F16"
    assert found["blk.0.ffn_up.weight"].tensor_type.name == "Q4_0"


def test_values_that_f16_cannot_hold_are_refused(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "tiny", "llama")
    loaded: Any = mx.load(str(folder / "model.safetensors"))
    loaded["model.layers.0.mlp.up_proj.weight"] *= 1e6
    write_weights(folder, loaded, dtype="bfloat16")
    with pytest.raises(ModelError, match=r"F16 cannot hold.*--quant bf16"):
        tensors(folder, "f16")
    assert not list(tmp_path.rglob("*.gguf"))
    assert tensors(folder, "bf16")


def test_weights_of_other_types_are_refused(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "tiny", "llama")
    loaded: Any = mx.load(str(folder / "model.safetensors"))
    loaded["model.norm.weight"] = loaded["model.norm.weight"].astype(mx.uint8)
    mx.save_safetensors(str(folder / "model.safetensors"), loaded)
    with pytest.raises(ModelError, match="types U8, so it is already quantised"):
        tensors(folder)


def test_an_index_that_names_a_tensor_that_no_file_has_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "tiny", "llama", shards=2)
    index = folder / "model.safetensors.index.json"
    named = json.loads(index.read_text())
    named["weight_map"]["model.extra.weight"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(named))
    with pytest.raises(ModelError, match=r"lacks model.extra.weight"):
        tensors(folder)
