"""Writes folders with tiny random text models: encoders, decoders and rerankers, as sentence-
transformers and transformers save them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
from safetensors.numpy import load_file

from tests.support.tiny import CONTROL, MERGED, spelling
from tests.support.tiny_bert import SPECIAL, WORDS
from tests.support.tiny_mlx import added_token

WIDTH, HIDDEN, HEADS, KV_HEADS, LAYERS, CONTEXT = 64, 128, 4, 2, 2, 128
PADDING = 1  # of RoBERTa
ENCODERS = ("bert", "roberta", "xlm-roberta", "distilbert")
DECODERS = ("llama", "mistral", "qwen2", "qwen3")
CHAT_CONTROL = (*CONTROL, "<|im_start|>", "<|im_end|>")

Array = np.ndarray[Any, np.dtype[np.float32]]


def write_encoder(
    folder: Path, kind: str = "bert", *, classes: int = 0, seed: int = 0, **config: Any
) -> Path:
    """With `classes`, the model has a head with this many scores."""
    names = {"distilbert": "DistilBert", "bert": "Bert"}.get(kind, "XLMRoberta")
    written = {
        "architectures": [f"{names}{'ForSequenceClassification' if classes else 'Model'}"],
        "model_type": kind,
        "vocab_size": _write_encoder_tokenizer(folder, kind),
        "max_position_embeddings": CONTEXT + (PADDING + 1 if "roberta" in kind else 0),
        "pad_token_id": PADDING if "roberta" in kind else 0,
    }
    if kind == "distilbert":
        written |= {"dim": WIDTH, "n_layers": LAYERS, "n_heads": HEADS, "hidden_dim": HIDDEN}
        written |= {"activation": "gelu"}
    else:
        written |= {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "hidden_act": "gelu"}
        written |= {"num_attention_heads": HEADS, "intermediate_size": HIDDEN}
        written |= {"layer_norm_eps": 1e-5, "type_vocab_size": 2 if kind == "bert" else 1}
    written |= config
    (folder / "config.json").write_text(json.dumps(written))
    shapes = _encoder_shapes(written)
    if classes:
        prefix = {"bert": "bert.", "distilbert": "distilbert."}.get(kind, "roberta.")
        shapes = {prefix + name: shape for name, shape in shapes.items()}
        shapes |= _head_shapes(kind, classes)
    _write_weights(folder, shapes, seed)
    return folder


def _encoder_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (config["vocab_size"], WIDTH),
        "embeddings.position_embeddings.weight": (config["max_position_embeddings"], WIDTH),
    }
    if "type_vocab_size" in config:
        shapes["embeddings.token_type_embeddings.weight"] = (config["type_vocab_size"], WIDTH)
    linear, norms = {}, ["embeddings.LayerNorm"]
    for layer in range(LAYERS):
        if config["model_type"] == "distilbert":
            at = f"transformer.layer.{layer}."
            for name in ("q", "k", "v", "out"):
                linear[f"{at}attention.{name}_lin"] = (WIDTH, WIDTH)
            linear |= {f"{at}ffn.lin1": (HIDDEN, WIDTH), f"{at}ffn.lin2": (WIDTH, HIDDEN)}
            norms += [f"{at}sa_layer_norm", f"{at}output_layer_norm"]
        else:
            at = f"encoder.layer.{layer}."
            for name in ("self.query", "self.key", "self.value", "output.dense"):
                linear[f"{at}attention.{name}"] = (WIDTH, WIDTH)
            linear[f"{at}intermediate.dense"] = (HIDDEN, WIDTH)
            linear[f"{at}output.dense"] = (WIDTH, HIDDEN)
            norms += [f"{at}attention.output.LayerNorm", f"{at}output.LayerNorm"]
    return (
        shapes
        | _with_bias(linear)
        | {f"{name}.weight": (WIDTH,) for name in norms}
        | {f"{name}.bias": (WIDTH,) for name in norms}
    )


def _head_shapes(kind: str, classes: int) -> dict[str, tuple[int, ...]]:
    dense, score = {
        "bert": ("bert.pooler.dense", "classifier"),
        "distilbert": ("pre_classifier", "classifier"),
    }.get(kind, ("classifier.dense", "classifier.out_proj"))
    return _with_bias({dense: (WIDTH, WIDTH), score: (classes, WIDTH)})


def _with_bias(shapes: Mapping[str, tuple[int, int]]) -> dict[str, tuple[int, ...]]:
    weights: dict[str, tuple[int, ...]] = {f"{name}.weight": each for name, each in shapes.items()}
    return weights | {f"{name}.bias": each[:1] for name, each in shapes.items()}


def _write_weights(folder: Path, shapes: Mapping[str, tuple[int, ...]], seed: int) -> None:
    random = np.random.default_rng(seed)
    weights = {
        name: mx.array(_drawn(random, name, shape)) for name, shape in sorted(shapes.items())
    }
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "pt"})


def _drawn(random: np.random.Generator, name: str, shape: tuple[int, ...]) -> Array:
    values = random.standard_normal(shape).astype(np.float32)
    if "embed_tokens" in name:  # also a head, whose outputs should not be extreme
        return values * np.float32(WIDTH**-0.5)
    if len(shape) > 1:
        return values if "embed" in name else values * np.float32(2 * shape[-1] ** -0.5)
    return values * np.float32(0.2) + np.float32(name.lower().endswith("norm.weight"))


def write_decoder(
    folder: Path,
    kind: str = "qwen3",
    *,
    head: bool = False,
    flat: bool = True,
    classes: int = 0,
    appends_end: bool = True,
    seed: int = 0,
    **config: Any,
) -> Path:
    """`flat` leaves the prefix out of the names of weights, as Qwen3-Embedding does."""
    suffix = "ForSequenceClassification" if classes else "ForCausalLM"
    written = {
        "architectures": [kind.title() + suffix],
        "model_type": kind,
        "vocab_size": _write_decoder_tokenizer(folder, appends_end=appends_end),
        "hidden_size": WIDTH,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": WIDTH // HEADS,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": not head,
        **config,
    }
    (folder / "config.json").write_text(json.dumps(written))
    shapes = _decoder_shapes(written)
    if not flat:
        shapes = {f"model.{name}": shape for name, shape in shapes.items()}
    if head:
        shapes["lm_head.weight"] = (written["vocab_size"], WIDTH)
    if classes:
        shapes["score.weight"] = (classes, WIDTH)
    _write_weights(folder, shapes, seed)
    return folder


def _decoder_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    head, kind, width = config["head_dim"], config["model_type"], config["hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (config["vocab_size"], width),
        "norm.weight": (width,),
    }
    for layer in range(LAYERS):
        at = f"layers.{layer}."
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            shapes[f"{at}self_attn.{name}_proj.weight"] = (heads * head, width)
            if kind == "qwen2":
                shapes[f"{at}self_attn.{name}_proj.bias"] = (heads * head,)
        if kind == "qwen3":
            shapes |= {f"{at}self_attn.{name}_norm.weight": (head,) for name in "qk"}
        shapes |= {
            f"{at}self_attn.o_proj.weight": (width, HEADS * head),
            f"{at}mlp.gate_proj.weight": (HIDDEN, width),
            f"{at}mlp.up_proj.weight": (HIDDEN, width),
            f"{at}mlp.down_proj.weight": (width, HIDDEN),
            f"{at}input_layernorm.weight": (width,),
            f"{at}post_attention_layernorm.weight": (width,),
        }
    return shapes


def write_modules(
    folder: Path, pooling: str | None = "mean", *, normalise: bool = True, more: str = ""
) -> Path:
    """Write the files of sentence-transformers. `more` is another module at the end."""
    named = [("Transformer", "")]
    if pooling is not None:
        named.append(("Pooling", "1_Pooling"))
        (folder / "1_Pooling").mkdir()
        flags = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "lasttoken")
        about = {f"pooling_mode_{flag}": re.sub("_tokens?$", "", flag) == pooling for flag in flags}
        (folder / "1_Pooling/config.json").write_text(json.dumps(about))
    named += [("Normalize", "2_Normalize")] * normalise
    named += [(more, f"3_{more}")] if more else []
    write_module_list(folder, *named)
    return folder


def write_module_list(folder: Path, *named: tuple[str, str]) -> None:
    listed = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.{kind}"}
        for number, (kind, path) in enumerate(named)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))


def _write_encoder_tokenizer(folder: Path, kind: str) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    if "roberta" in kind:
        special = ("<s>", "<pad>", "</s>", "<unk>")
        pieces = (*(f"\u2581{word}" for word in (*WORDS, *ascii_lowercase)), *ascii_lowercase)
        words = [*special, "\u2581", *pieces]
        model: dict[str, Any] = {
            "type": "Unigram",
            "unk_id": special.index("<unk>"),
            "vocab": [[word, -float(len(word) == 1)] for word in words],
        }
        split = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always"}
        frame: dict[str, Any] = {"type": "RobertaProcessing", "sep": ["</s>", 2], "cls": ["<s>", 0]}
        frame |= {"trim_offsets": True, "add_prefix_space": True}
        normalizer: dict[str, Any] = {"type": "Lowercase"}
    else:
        special = SPECIAL
        words = [*special, *WORDS, *ascii_lowercase, *(f"##{each}" for each in ascii_lowercase)]
        model = {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": {word: place for place, word in enumerate(dict.fromkeys(words))},
        }
        split = {"type": "BertPreTokenizer"}
        frame = {"type": "BertProcessing", "sep": ["[SEP]", 3], "cls": ["[CLS]", 2]}
        normalizer = {"type": "BertNormalizer", "lowercase": True, "clean_text": True}
        normalizer |= {"handle_chinese_chars": True, "strip_accents": None}
    decoder = split if "roberta" in kind else {"type": "WordPiece", "prefix": "##", "cleanup": True}
    written = {
        "version": "1.0",
        "truncation": {"max_length": 4, "strategy": "LongestFirst", "stride": 0,
                       "direction": "Right"},  # what a training run left behind
        "added_tokens": [added_token(place, name) for place, name in enumerate(special)],
        "normalizer": normalizer,
        "pre_tokenizer": split,
        "post_processor": frame,
        "decoder": decoder,
        "model": model,
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(written))
    return len(model["vocab"])


def _write_decoder_tokenizer(folder: Path, *, appends_end: bool) -> int:
    """Bytes, control tokens, and whole words for answers. The first control token is the end."""
    folder.mkdir(parents=True, exist_ok=True)
    spelled = [spelling(byte).decode() for byte in range(256)]
    words = [*CHAT_CONTROL, *spelled, MERGED.decode(), "ye", "yes", "no"]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    end = CHAT_CONTROL[0]
    template = {
        "type": "TemplateProcessing",
        "single": [
            {"Sequence": {"id": "A", "type_id": 0}},
            {"SpecialToken": {"id": end, "type_id": 0}},
        ],
        "pair": [
            {"Sequence": {"id": "A", "type_id": 0}},
            {"Sequence": {"id": "B", "type_id": 0}},
            {"SpecialToken": {"id": end, "type_id": 0}},
        ],
        "special_tokens": {end: {"id": end, "ids": [0], "tokens": [end]}},
    }
    frames = [byte_level, template] if appends_end else [byte_level]
    written = {
        "version": "1.0",
        "added_tokens": [added_token(place, name) for place, name in enumerate(CHAT_CONTROL)],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": {"type": "Sequence", "processors": frames},
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": {name: place for place, name in enumerate(words)},
            "merges": [["t", "h"], ["y", "e"], ["ye", "s"], ["n", "o"]],
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(written))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    return len(words)


_GGUF_NAMES = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write_reranker_gguf(
    folder: Path,
    path: Path,
    *,
    labels: Sequence[str] = ("yes", "no"),
    prompt: str | None = None,
) -> Path:
    """Write a Qwen3 folder as llama.cpp's converter writes a reranker: with the rows of the answers
    as its head."""
    writer: Any = gguf.GGUFWriter(str(path), "qwen3")
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    writer.add_context_length(1024)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(WIDTH // HEADS)
    writer.add_value_length(WIDTH // HEADS)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_pooling_type(gguf.PoolingType.RANK)
    writer.add_classifier_output_labels(list(labels))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(list(vocabulary))
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_token_types([control if each in CHAT_CONTROL else normal for each in vocabulary])
    writer.add_token_merges(["t h", "y e", "ye s", "n o"])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_add_bos_token(False)
    if prompt is not None:
        writer.add_chat_template([{"name": "rerank", "template": prompt}])
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors["embed_tokens.weight"]
    rows = [embedding[vocabulary.get(label, 0)] for label in labels]
    writer.add_tensor("cls.output.weight", np.stack(rows))
    for name, tensor in tensors.items():
        stem = name.removesuffix(".weight")
        layer, _, part = stem.removeprefix("layers.").partition(".")
        ours = f"blk.{layer}.{_GGUF_NAMES[part]}" if part else _GGUF_NAMES[stem]
        writer.add_tensor(f"{ours}.weight", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


_GGUF_BERT_NAMES = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
    "pooler.dense": "cls",
    "classifier": "cls.output",
}


def write_cross_encoder_gguf(folder: Path, path: Path) -> Path:
    """Write a BERT folder with one score as a GGUF file with rank pooling."""
    writer: Any = gguf.GGUFWriter(str(path), "bert")
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_layer_norm_eps(1e-5)
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.RANK)
    writer.add_classifier_output_labels(["score"])
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([f"\u2581{each}" if each not in SPECIAL else each for each in vocabulary])
    writer.add_token_types([3 if each in SPECIAL else 1 for each in vocabulary])
    writer.add_token_type_count(2)
    writer.add_bos_token_id(SPECIAL.index("[CLS]"))
    writer.add_sep_token_id(SPECIAL.index("[SEP]"))
    writer.add_unk_token_id(SPECIAL.index("[UNK]"))
    for name, tensor in load_file(folder / "model.safetensors").items():
        stem, _, part = name.removeprefix("bert.").rpartition(".")
        layer, _, rest = stem.removeprefix("encoder.layer.").partition(".")
        is_in_layer = stem.startswith("encoder.layer.")
        ours = _GGUF_BERT_NAMES[rest if is_in_layer else stem]
        writer.add_tensor(f"blk.{layer}.{ours}.{part}" if is_in_layer else f"{ours}.{part}", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
