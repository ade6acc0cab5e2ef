"""Provides the models for scenarios that cannot use SmolLM2 unchanged."""

from __future__ import annotations

import sys
from pathlib import Path

import gguf
import numpy as np
from gguf.scripts.gguf_new_metadata import MetadataDetails, copy_with_new_metadata

from rekindle.models.catalogue import DEFAULT_VISION_MODEL
from rekindle.models.pull import packaged_projector

ROOT = Path(__file__).parents[1]
TEMPLATE_KEY = "tokenizer.chat_template"
CONTEXT_TOKENS = 8192
WIDTH, HEADS = 64, 1  # width of the model with one layer
LAYER = (
    ("attn_q", WIDTH, WIDTH), ("attn_k", WIDTH, WIDTH), ("attn_v", WIDTH, WIDTH),
    ("attn_output", WIDTH, WIDTH), ("ffn_gate", 2 * WIDTH, WIDTH), ("ffn_up", 2 * WIDTH, WIDTH),
    ("ffn_down", WIDTH, 2 * WIDTH),
)  # fmt: skip

# SmolLM2's own template does not show tools. Rekindle writes them into messages, and llama.cpp
# leaves tools and calls out. With a template that shows them, both servers read the same tokens.
TOOL_TEMPLATE = (
    "{% set merged = tools and messages[0]['role'] == 'system' %}"
    "{% if tools %}<|im_start|>system\n{% if merged %}{{ messages[0]['content'] }}\n\n{% endif %}"
    "You may call these functions:\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "<|im_end|>\n{% endif %}"
    "{% for message in messages %}{% if not (merged and loop.first) %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] or '' }}"
    "{% for call in message['tool_calls'] or [] %}<tool_call>\n"
    "{\"name\": {{ call['function']['name'] | tojson }}, "
    "\"arguments\": {{ call['function']['arguments'] | tojson }}}"
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def fitting(scenario: str, model: Path, folder: Path) -> Path:
    """The model itself, or one that is written into the folder for this scenario."""
    match scenario:
        case "toolloop":
            return with_tool_template(model, folder / f"{model.stem}-tools.gguf")
        case "hybrid":
            return _tiny_hybrid(folder / "tiny-lfm2.gguf")
    return model


def projector(scenario: str) -> Path | None:
    """The projector of a model for scenarios with pictures."""
    return packaged_projector(DEFAULT_VISION_MODEL) if scenario == "pictures" else None


def with_tool_template(model: Path, copy: Path) -> Path:
    """Write the same weights and tokens with a chat template that shows tools."""
    reader = gguf.GGUFReader(model)
    writer = gguf.GGUFWriter(copy, reader.fields["general.architecture"].contents())
    writer.data_alignment = reader.alignment
    template = MetadataDetails(gguf.GGUFValueType.STRING, TOOL_TEMPLATE)
    copy_with_new_metadata(reader, writer, {TEMPLATE_KEY: template}, [])
    return copy


def _tiny_hybrid(path: Path) -> Path:
    """Write random weights. They do not affect which tokens are computed twice."""
    sys.path.append(str(ROOT))  # the path of a script does not include the tests
    from tests.support.tiny import write_lfm2

    return write_lfm2(path, context=CONTEXT_TOKENS)


def one_layer(model: Path, path: Path, *, context: int = 32_768, seed: int = 0) -> Path:
    """Write a model with a real vocabulary and template, and one layer of random weights.

    Computing a token takes almost no time, so the measured time is the work of the server.
    """
    reader = gguf.GGUFReader(model)
    writer = gguf.GGUFWriter(path, "llama")
    for name, part in reader.fields.items():
        if name.startswith("tokenizer."):
            kind, *of = part.types
            writer.add_key_value(name, part.contents(), kind, of[0] if of else None)
    size = len(reader.fields["tokenizer.ggml.tokens"].data)
    numbers = {
        "context_length": context, "embedding_length": WIDTH, "block_count": 1, "vocab_size": size,
        "feed_forward_length": 2 * WIDTH, "attention.head_count": HEADS,
        "attention.head_count_kv": HEADS, "rope.dimension_count": WIDTH // HEADS,
    }  # fmt: skip
    for name, number in numbers.items():
        writer.add_uint32(f"llama.{name}", number)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    chance = np.random.default_rng(seed)
    shapes = {"token_embd": (size, WIDTH), "output_norm": (WIDTH,)} | {
        f"blk.0.{name}": (rows, columns) for name, rows, columns in LAYER
    } | {f"blk.0.{name}_norm": (WIDTH,) for name in ("attn", "ffn")}  # fmt: skip
    for name, shape in shapes.items():
        random = chance.standard_normal(shape, np.float32) / WIDTH**0.5
        writer.add_tensor(
            f"{name}.weight", random if len(shape) > 1 else np.ones(shape, np.float32)
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
