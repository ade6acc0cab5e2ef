"""Writes tiny random vision models in MLX's format, one of each supported family."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_flatten

import rekindle.engine.mlx  # noqa: F401  # before mlx_lm, whose import it makes harmless
from tests.support.tiny import VOCABULARY
from tests.support.tiny_mlx import added_token, write_tokenizer

WIDTH, HEADS, KV_HEADS = 64, 4, 2
WINDOW = 64
SIDE = 32  # pixels of the square that a tower takes
_TEXT: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
_TOWER: dict[str, Any] = {
    "model_type": "clip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": SIDE,
    "patch_size": 8,
    "num_channels": 3,
    "layer_norm_eps": 1e-6,
}
_SIGLIP = _TOWER | {"model_type": "siglip_vision_model"}
_MROPE = {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
_QWEN_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_PLACES = tuple(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2))
_QWEN_IDS = {
    "vision_start_token_id": VOCABULARY,
    "vision_end_token_id": VOCABULARY + 1,
    "image_token_id": VOCABULARY + 2,
    "video_token_id": VOCABULARY + 3,
}
_QWEN_PIXELS = {
    "min_pixels": 16 * 16,
    "max_pixels": 48 * 48,
    "patch_size": 4,
    "merge_size": 2,
    "image_mean": [0.48, 0.46, 0.41],
    "image_std": [0.27, 0.26, 0.28],
}
_TILES = (
    {
        "text_config": _TEXT,
        "vision_config": _SIGLIP,
        "scale_factor": 2,
        "image_token_id": VOCABULARY,
    },
    {"size": {"longest_edge": 2 * SIDE}, "max_image_size": {"longest_edge": SIDE}},
    ("<image>", "<fake_token_around_image>", "<global-img>", *_PLACES),
)
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 32,
}
Settings = dict[str, Any]


def _qwen3(family: str, experts: Settings) -> tuple[Settings, Settings, tuple[str, ...]]:
    rope = {"rope_type": "default", "mrope_section": [4, 2, 2]}
    text = {"model_type": family, "head_dim": 16, "num_hidden_layers": 3, "rope_scaling": rope}
    vision = {
        "model_type": family,
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 64,
        "out_hidden_size": WIDTH,
        "num_heads": 2,
        "patch_size": 4,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
    }
    config = _QWEN_IDS | {"text_config": _TEXT | text | experts, "vision_config": vision}
    return config, _QWEN_PIXELS, _QWEN_TOKENS


#: Configuration, preprocessor and control tokens of each family.
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "llava": (
        {"text_config": _TEXT, "vision_config": _TOWER, "image_token_index": VOCABULARY},
        {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}},
        ("<image>",),
    ),
    "smolvlm": _TILES,
    "idefics3": _TILES,
    "gemma3": (
        {
            "hidden_size": WIDTH,
            "text_config": _TEXT
            | {
                "model_type": "gemma3_text",
                "num_hidden_layers": 4,
                "head_dim": 16,
                "query_pre_attn_scalar": 16,
                "sliding_window": WINDOW,
                "sliding_window_pattern": 2,
                "mm_tokens_per_image": 16,
            },
            "vision_config": _SIGLIP | {"patch_size": 4},
            "image_token_index": VOCABULARY,
        },
        {"size": {"height": SIDE, "width": SIDE}},
        ("<image_soft_token>", "<start_of_image>", "<end_of_image>"),
    ),
    "qwen2_vl": (
        _QWEN_IDS
        | {
            "text_config": _TEXT | _MROPE,
            "vision_config": {
                "model_type": "qwen2_vl",
                "depth": 2,
                "embed_dim": 32,
                "hidden_size": WIDTH,
                "num_heads": 2,
                "patch_size": 4,
                "mlp_ratio": 2,
            },
        },
        _QWEN_PIXELS,
        _QWEN_TOKENS,
    ),
    "qwen2_5_vl": (
        _QWEN_IDS
        | {
            "text_config": _TEXT | _MROPE,
            "vision_config": {
                "model_type": "qwen2_5_vl",
                "depth": 2,
                "hidden_size": 32,
                "intermediate_size": 64,
                "out_hidden_size": WIDTH,
                "num_heads": 2,
                "patch_size": 4,
                "spatial_patch_size": 4,
                "window_size": 16,
                "fullatt_block_indexes": [1],
            },
        },
        _QWEN_PIXELS,
        _QWEN_TOKENS,
    ),
    "qwen3_vl": _qwen3("qwen3_vl", {}),
    "qwen3_vl_moe": _qwen3("qwen3_vl_moe", _EXPERTS),
}

#: Families whose text settings are at the top of config.json.
FLAT = ("qwen2_vl", "qwen2_5_vl")


def write_tiny_vision(path: Path, family: str, *, seed: int = 0, **text: Any) -> Path:
    """Write a folder with a model of the family. `text` overrides its `text_config`."""
    config, pixels, tokens = FAMILIES[family]
    vocabulary = VOCABULARY + len(tokens)
    written = {"model_type": family, "vocab_size": vocabulary, "pad_token_id": 0, **config}
    written.pop("text_config")
    about = config["text_config"] | {"vocab_size": vocabulary} | text
    is_flat = family in FLAT
    written |= about | {"model_type": family} if is_flat else {"text_config": about}
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(written))
    (path / "preprocessor_config.json").write_text(json.dumps(pixels))
    weights = _random_weights(written, seed)
    mx.save_safetensors(str(path / "model.safetensors"), weights, {"format": "mlx"})
    write_tokenizer(path)
    _add_tokens(path, tokens)
    return path


def quantise(path: Path) -> None:
    """Write the folder again as published ones are: bfloat16, and 4 bits for the language model."""
    from mlx_vlm.utils import load_model

    model = load_model(path)
    model.set_dtype(mx.bfloat16)
    how = {"group_size": 32, "bits": 4}
    quantize(model.language_model, group_size=how["group_size"], bits=how["bits"])
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(path / "model.safetensors"), weights, {"format": "mlx"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization": how}))


def _add_tokens(path: Path, tokens: tuple[str, ...]) -> None:
    file = path / "tokenizer.json"
    about = json.loads(file.read_text())
    about["added_tokens"] += [added_token(VOCABULARY + n, text) for n, text in enumerate(tokens)]
    file.write_text(json.dumps(about))


def _random_weights(config: dict[str, Any], seed: int) -> dict[str, mx.array]:
    """Draw all weights from the seed. Pictures have to change the answer."""
    from mlx_vlm.utils import update_module_configs

    random = np.random.default_rng(seed)
    module = import_module(f"mlx_vlm.models.{config['model_type']}")
    copied = json.loads(json.dumps(config))  # mlx_vlm changes it
    about = module.ModelConfig.from_dict(copied)
    about = update_module_configs(about, module, copied, ["text", "vision"])
    named: dict[str, mx.array] = dict(tree_flatten(module.Model(about).parameters()))
    return {name: _drawn(name, named[name], random) for name in sorted(named)}


def _drawn(name: str, value: mx.array, random: np.random.Generator) -> mx.array:
    noise = random.standard_normal(value.shape).astype(np.float32)
    if value.ndim < 2:
        center = 0.0 if name.endswith("bias") or "class_embedding" in name else 1.0
        if "gemma" in name:
            center = 0.0
        return mx.array(center + 0.1 * noise)
    columns = int(np.prod(value.shape[1:]))
    scale = 0.25 if "embed_tokens" in name else columns**-0.5
    drawn = noise * scale
    if name.endswith("lm_head.weight"):
        drawn[:3] = drawn[3 + 128 :] = 0  # it writes only ASCII
    return mx.array(drawn)
