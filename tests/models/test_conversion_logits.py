"""A converted model computes on llama.cpp what mlx-lm computes from the folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rekindle.models.conversion import convert
from tests.support.tiny_safetensors import (
    CONFIGS,
    WINDOW,
    llama_logits,
    mlx_logits,
    write_tiny_folder,
)

from .tiny import RecordedProgress

#: Longer than the sliding windows and than the original contexts of scaled positions but llama-3's.
TOKENS = [3 + (7 * place) % 200 for place in range(160)]
SAME = 5e-5  # measured: up to 1.2e-5, of logits up to 9
#: llama.cpp takes GELU from a table in F16. Measured: 2.8e-3, of logits up to 14.
SAME_GELU = 1e-2


def tolerance(family: str) -> float:
    return SAME_GELU if family.startswith("gemma") else SAME


def converted(folder: Path, **options: Any) -> Path:
    models_dir = folder.parent / "models"
    return convert(folder, models_dir=models_dir, progress=RecordedProgress(), **options)


def compare(folder: Path, family: str, **options: Any) -> None:
    expected = mlx_logits(folder, TOKENS)
    found = llama_logits(converted(folder, **options), TOKENS)
    assert abs(found - expected).max() < tolerance(family)
    assert np.array_equal(found.argmax(1), expected.argmax(1))
    assert (
        len(set(expected.argmax(1).tolist())) > 10
    )  # a model that says only one thing proves nothing


@pytest.mark.parametrize("family", CONFIGS)
def test_logits_agree_with_mlx_lm(family: str, tmp_path: Path) -> None:
    compare(write_tiny_folder(tmp_path / family, family), family)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["llama", "qwen3-moe", "gemma3", "phi3-long"])
def test_halved_weights_in_several_files_give_the_same_logits(
    family: str, dtype: str, tmp_path: Path
) -> None:
    """As F32, because each library rounds the factors of halved weights in its own way."""
    folder = write_tiny_folder(tmp_path / family, family, dtype=dtype, shards=3)
    compare(folder, family, quant="f32")


@pytest.mark.parametrize(
    ("quant", "difference"), [("f16", 0.02), ("bf16", 0.1), ("q8_0", 0.2), ("q4_0", 2.0)]
)
def test_each_quantisation_stays_close_to_the_weights(
    quant: str, difference: float, tmp_path: Path
) -> None:
    folder = write_tiny_folder(tmp_path / "tiny", "qwen3")
    exact = mlx_logits(folder, TOKENS)
    assert abs(llama_logits(converted(folder, quant=quant), TOKENS) - exact).max() < difference


def test_the_text_part_of_a_gemma_with_a_picture_encoder_is_converted(tmp_path: Path) -> None:
    """Under both names that its language model has had."""
    alone = write_tiny_folder(tmp_path / "gemma", "gemma3")
    expected = llama_logits(converted(alone), TOKENS)
    for place, prefix in enumerate(("language_model.model.", "model.language_model.")):
        folder = with_pictures(alone, tmp_path / f"gemma-{place}", prefix)
        progress = RecordedProgress()
        path = convert(folder, models_dir=tmp_path / "models", progress=progress)
        assert "reads text only" in progress.lines[0]
        assert np.array_equal(llama_logits(path, TOKENS), expected)


def with_pictures(alone: Path, folder: Path, prefix: str) -> Path:
    import mlx.core as mx

    folder.mkdir()
    loaded: Any = mx.load(str(alone / "model.safetensors"))
    weights = {name.replace("model.", prefix, 1): value for name, value in loaded.items()}
    weights["vision_tower.embeddings.weight"] = mx.zeros((2, 2))
    weights["multi_modal_projector.mm_input_projection_weight"] = mx.zeros((2, 2))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    text = json.loads((alone / "config.json").read_text())
    config = {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": text | {"tie_word_embeddings": None},
        "vision_config": {"hidden_size": 2},
    }
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((alone / name).read_bytes())
    return folder


def test_settings_in_the_spelling_of_newer_libraries_mean_the_same(tmp_path: Path) -> None:
    cases: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
        "llama-3": lambda given: {
            "rope_parameters": {**given["rope_scaling"], "rope_theta": given["rope_theta"]}
        },
        "gemma3-linear": lambda given: {
            "rope_parameters": {
                "full_attention": {**given["rope_scaling"], "rope_theta": given["rope_theta"]},
                "sliding_attention": {
                    "rope_type": "default",
                    "rope_theta": given["rope_local_base_freq"],
                },
            },
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    }
    for family, newer in cases.items():
        old = write_tiny_folder(tmp_path / family, family)
        expected = llama_logits(converted(old), TOKENS)
        given = CONFIGS[family]
        gone = ("rope_scaling", "rope_theta", "rope_local_base_freq", "sliding_window_pattern")
        config = {name: value for name, value in given.items() if name not in gone}
        (old / "config.json").write_text(json.dumps(config | newer(given)))
        assert np.array_equal(llama_logits(converted(old), TOKENS), expected), family


def test_the_context_ends_at_a_sliding_window_that_llama_cpp_does_not_have(tmp_path: Path) -> None:
    from tests.support.gguf_vocabulary import read_metadata

    cases: list[tuple[str, dict[str, Any], int]] = [
        ("mistral", {"sliding_window": WINDOW}, WINDOW),
        ("qwen2", {"sliding_window": WINDOW}, 4096),
        ("qwen2", {"sliding_window": WINDOW, "use_sliding_window": True}, WINDOW),
        ("gemma3", {"sliding_window": WINDOW}, 4096),
    ]
    for family, config, context in cases:
        folder = write_tiny_folder(tmp_path / family, family, **config)
        values = read_metadata(converted(folder))
        assert values[f"{values['general.architecture']}.context_length"] == context
