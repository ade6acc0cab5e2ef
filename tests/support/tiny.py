"""Writes tiny random GGUF models with a byte vocabulary and a chat template.

They are really loaded, without a download.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

WIDTH, HIDDEN, HEADS, KV_HEADS, HEAD_WIDTH = 64, 128, 4, 2, 16
CONTROL = ("<|end|>", "<|turn|>", "<|pad|>")
TEMPLATE = (
    "{% for message in messages %}<|turn|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
MERGED = b"th"  # llama.cpp needs at least one merge
VOCABULARY = 256 + len(CONTROL) + 1


class TinyModel:
    """Writes one model file from a seed, tensor by tensor."""

    def __init__(self, path: Path, architecture: str, layers: int, seed: int, context: int) -> None:
        self.architecture = architecture
        self.layers = layers
        self._random = np.random.default_rng(seed)
        self.writer: Any = gguf.GGUFWriter(str(path), architecture)
        for key, value in {
            "context_length": context,
            "embedding_length": WIDTH,
            "block_count": layers,
            "feed_forward_length": HIDDEN,
            "vocab_size": VOCABULARY,
        }.items():
            self.writer.add_uint32(f"{architecture}.{key}", value)
        self.writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-5)
        self._add_vocabulary()
        self.matrix("token_embd.weight", WIDTH, VOCABULARY, scale=1.0)

    def _add_vocabulary(self) -> None:
        names = [name.encode() for name in CONTROL] + [spelling(byte) for byte in range(256)]
        names.append(MERGED)
        kinds = [gguf.TokenType.CONTROL] * len(CONTROL) + [gguf.TokenType.NORMAL] * 257
        self.writer.add_tokenizer_model("gpt2")
        self.writer.add_tokenizer_pre("gpt-2")
        self.writer.add_token_list(names)
        self.writer.add_token_types(kinds)
        self.writer.add_token_merges(["t h"])
        self.writer.add_eos_token_id(0)
        self.writer.add_bos_token_id(1)
        self.writer.add_pad_token_id(2)
        self.writer.add_add_bos_token(False)
        self.writer.add_chat_template(TEMPLATE)

    def number(self, key: str, value: int) -> None:
        self.writer.add_uint32(f"{self.architecture}.{key}", value)

    def matrix(self, name: str, columns: int, rows: int, scale: float | None = None) -> None:
        values = self._random.standard_normal((rows, columns)).astype(np.float32)
        self.writer.add_tensor(name, values * (columns**-0.5 if scale is None else scale))

    def ones(self, name: str, size: int) -> None:
        self.writer.add_tensor(name, np.ones(size, np.float32))

    def attention_and_hidden(self, block: str) -> None:
        self.attention(block)
        self.hidden(block)

    def attention(self, block: str) -> None:
        self.matrix(block + "attn_q.weight", WIDTH, HEADS * HEAD_WIDTH)
        self.matrix(block + "attn_k.weight", WIDTH, KV_HEADS * HEAD_WIDTH)
        self.matrix(block + "attn_v.weight", WIDTH, KV_HEADS * HEAD_WIDTH)
        self.matrix(block + "attn_output.weight", HEADS * HEAD_WIDTH, WIDTH)

    def hidden(self, block: str) -> None:
        self.matrix(block + "ffn_gate.weight", WIDTH, HIDDEN)
        self.matrix(block + "ffn_up.weight", WIDTH, HIDDEN)
        self.matrix(block + "ffn_down.weight", HIDDEN, WIDTH)

    def finish(self) -> None:
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()


class CodeModel(TinyModel):
    """A model whose control tokens are those for filling in the middle."""

    def _add_vocabulary(self) -> None:
        super()._add_vocabulary()
        self.writer.add_uint32("tokenizer.ggml.fim_pre_token_id", 0)
        self.writer.add_uint32("tokenizer.ggml.fim_suf_token_id", 1)
        self.writer.add_uint32("tokenizer.ggml.fim_mid_token_id", 2)


def write_llama(
    path: Path,
    *,
    layers: int = 2,
    seed: int = 0,
    context: int = 4096,
    pooling: int | None = None,
    kind: type[TinyModel] = TinyModel,
) -> Path:
    """Full attention. The state can be truncated anywhere."""
    model = kind(path, "llama", layers, seed, context)
    if pooling is not None:
        model.number("pooling_type", pooling)
    model.number("attention.head_count", HEADS)
    model.number("attention.head_count_kv", KV_HEADS)
    model.number("rope.dimension_count", HEAD_WIDTH)
    model.ones("output_norm.weight", WIDTH)
    for layer in range(layers):
        block = f"blk.{layer}."
        model.ones(block + "attn_norm.weight", WIDTH)
        model.ones(block + "ffn_norm.weight", WIDTH)
        model.attention_and_hidden(block)
    model.finish()
    return path


def write_phi3(
    path: Path, *, layers: int = 2, seed: int = 0, context: int = 4096, original: int = 512
) -> Path:
    """LongRoPE: one set of rotation factors up to the original context, and another beyond it."""
    model = TinyModel(path, "phi3", layers, seed, context)
    model.number("attention.head_count", HEADS)
    model.number("attention.head_count_kv", KV_HEADS)
    model.number("rope.dimension_count", HEAD_WIDTH)
    model.number("rope.scaling.original_context_length", original)
    model.writer.add_rope_scaling_attn_factors(1.2)
    for name, factor in (("short", 1.0), ("long", 4.0)):
        factors = np.linspace(1.0, factor, HEAD_WIDTH // 2, dtype=np.float32)
        model.writer.add_tensor(f"rope_factors_{name}.weight", factors)
    model.ones("output_norm.weight", WIDTH)
    for layer in range(layers):
        block = f"blk.{layer}."
        model.ones(block + "attn_norm.weight", WIDTH)
        model.ones(block + "ffn_norm.weight", WIDTH)
        model.matrix(block + "attn_qkv.weight", WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_WIDTH)
        model.matrix(block + "attn_output.weight", HEADS * HEAD_WIDTH, WIDTH)
        model.matrix(block + "ffn_up.weight", WIDTH, 2 * HIDDEN)
        model.matrix(block + "ffn_down.weight", HIDDEN, WIDTH)
    model.finish()
    return path


def write_gemma3(
    path: Path,
    *,
    layers: int = 6,
    seed: int = 0,
    context: int = 4096,
    window: int = 64,
    head_width: int = HEAD_WIDTH,
) -> Path:
    """Sliding windows and full attention."""
    model = TinyModel(path, "gemma3", layers, seed, context)
    for key, value in {
        "head_count": HEADS * HEAD_WIDTH // head_width,
        "head_count_kv": KV_HEADS * HEAD_WIDTH // head_width,
        "key_length": head_width,
        "value_length": head_width,
        "sliding_window": window,
    }.items():
        model.number(f"attention.{key}", value)
    model.ones("output_norm.weight", WIDTH)
    for layer in range(layers):
        block = f"blk.{layer}."
        for name in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
            model.ones(f"{block}{name}.weight", WIDTH)
        for name in ("attn_q_norm", "attn_k_norm"):
            model.ones(f"{block}{name}.weight", head_width)
        model.attention_and_hidden(block)
    model.finish()
    return path


def write_mamba(path: Path, *, layers: int = 3, seed: int = 0, context: int = 4096) -> Path:
    """Recurrent. The state cannot be truncated."""
    inner, kernel, state, rank = 2 * WIDTH, 4, 16, 8
    model = TinyModel(path, "mamba", layers, seed, context)
    for key, value in {
        "conv_kernel": kernel,
        "inner_size": inner,
        "state_size": state,
        "time_step_rank": rank,
    }.items():
        model.number(f"ssm.{key}", value)
    model.number("attention.head_count", 0)
    model.ones("output_norm.weight", WIDTH)
    random = np.random.default_rng(seed + 1)
    for layer in range(layers):
        block = f"blk.{layer}."
        model.ones(block + "attn_norm.weight", WIDTH)
        model.matrix(block + "ssm_in.weight", WIDTH, 2 * inner)
        model.matrix(block + "ssm_conv1d.weight", kernel, inner)
        model.ones(block + "ssm_conv1d.bias", inner)
        model.matrix(block + "ssm_x.weight", inner, rank + 2 * state)
        model.matrix(block + "ssm_dt.weight", rank, inner)
        model.ones(block + "ssm_dt.bias", inner)
        decay = -np.abs(random.standard_normal((inner, state))).astype(np.float32)
        model.writer.add_tensor(block + "ssm_a", decay)
        model.ones(block + "ssm_d", inner)
        model.matrix(block + "ssm_out.weight", inner, WIDTH)
    model.finish()
    return path


def write_lfm2(
    path: Path,
    *,
    layers: int = 4,
    seed: int = 0,
    context: int = 4096,
    head_width: int = HEAD_WIDTH,
) -> Path:
    """Hybrid: short convolutions, whose state cannot be truncated, and attention in every other
    layer."""
    kernel = 3
    model = TinyModel(path, "lfm2", layers, seed, context)
    kv_heads = KV_HEADS * HEAD_WIDTH // head_width
    heads = [kv_heads if layer % 2 else 0 for layer in range(layers)]
    model.number("attention.head_count", HEADS * HEAD_WIDTH // head_width)
    model.writer.add_array("lfm2.attention.head_count_kv", heads)
    model.number("shortconv.l_cache", kernel)
    model.ones("token_embd_norm.weight", WIDTH)
    for layer, attends in enumerate(heads):
        block = f"blk.{layer}."
        model.ones(block + "attn_norm.weight", WIDTH)
        model.ones(block + "ffn_norm.weight", WIDTH)
        if attends:
            model.ones(block + "attn_q_norm.weight", head_width)
            model.ones(block + "attn_k_norm.weight", head_width)
            model.attention(block)
        else:
            model.matrix(block + "shortconv.conv.weight", kernel, WIDTH)
            model.matrix(block + "shortconv.in_proj.weight", WIDTH, 3 * WIDTH)
            model.matrix(block + "shortconv.out_proj.weight", WIDTH, WIDTH)
        model.hidden(block)
    model.finish()
    return path


def spelling(byte: int) -> bytes:
    """GPT-2's printable character for a byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    if byte in printable:
        return chr(byte).encode()
    others = [each for each in range(256) if each not in printable]
    return chr(256 + others.index(byte)).encode()


def write_adapter(
    path: Path, *, seed: int = 0, rank: int = 4, layers: int = 2, width: int = WIDTH
) -> Path:
    """Write a LoRA adapter for the query and output matrices of a tiny Llama."""
    random = np.random.default_rng(seed)
    writer: Any = gguf.GGUFWriter(str(path), "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(rank))
    for layer in range(layers):
        for name in ("attn_q", "attn_output", "ffn_down"):
            columns = HIDDEN if name == "ffn_down" else width
            rows = width
            a = random.standard_normal((rank, columns)).astype(np.float32) * columns**-0.5
            b = random.standard_normal((rows, rank)).astype(np.float32)
            writer.add_tensor(f"blk.{layer}.{name}.weight.lora_a", a)
            writer.add_tensor(f"blk.{layer}.{name}.weight.lora_b", b)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
