"""Writes a tiny SentencePiece vocabulary as a GGUF file and as a tokenizer.json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf

from tests.support.tiny_mlx import added_token

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
CONTROL = ("<s>", "</s>", "<|turn|>")
MERGES = [
    (SPACE, "t"), ("h", "e"), (SPACE + "t", "he"), ("l", "l"), ("he", "ll"), ("hell", "o"),
    (SPACE, "hello"), (SPACE, SPACE), (SPACE + SPACE, SPACE + SPACE),
]  # fmt: skip
CHARACTERS = [SPACE, *"abcdefghilnorst.,<|>/u", "é"]
TOKENS = [
    "<unk>",
    *CONTROL,
    *(f"<0x{byte:02X}>" for byte in range(256)),
    *CHARACTERS,
    *(left + right for left, right in MERGES),
]


def write_sentencepiece_gguf(
    path: Path, *, space_in_front: bool, name: str = "tiny", user_defined: Sequence[str] = ()
) -> Path:
    """Write only the vocabulary, without a model. llama.cpp gives special tokens other attributes
    if the name is that of some models."""
    kind = gguf.TokenType
    tokens = [*TOKENS, *user_defined]
    kinds = [kind.UNKNOWN, *[kind.CONTROL] * len(CONTROL), *[kind.BYTE] * 256]
    kinds += [kind.NORMAL] * (len(TOKENS) - len(kinds)) + [kind.USER_DEFINED] * len(user_defined)
    writer: Any = gguf.GGUFWriter(str(path), "llama")
    writer.add_name(name)
    for name in ("context_length", "embedding_length", "block_count", "feed_forward_length"):
        writer.add_uint32(f"llama.{name}", 32)
    writer.add_uint32("llama.attention.head_count", 1)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([text.encode() for text in tokens])
    writer.add_token_scores([-float(place) for place in range(len(tokens))])
    writer.add_token_types(kinds)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(space_in_front)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_sentencepiece_folder(folder: Path, *, space_in_front: bool) -> Path:
    """Write tokenizer.json like the converters of such vocabularies."""
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    prepend = [{"type": "Prepend", "prepend": SPACE}] if space_in_front else []
    decoders = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]
    tokenizer = {
        "version": "1.0",
        "added_tokens": [added_token(at, text) for at, text in enumerate(["<unk>", *CONTROL])],
        "normalizer": {"type": "Sequence", "normalizers": [*prepend, replace]},
        "post_processor": _begins_with_bos(),
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": {text: token for token, text in enumerate(TOKENS)},
            "merges": MERGES,
        },
    }
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    about = {"bos_token": {"content": CONTROL[0]}, "eos_token": CONTROL[1]}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return folder


def _begins_with_bos() -> dict[str, Any]:
    bos = {"SpecialToken": {"id": CONTROL[0], "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [bos, text],
        "pair": [bos, text],
        "special_tokens": {CONTROL[0]: {"id": CONTROL[0], "ids": [1], "tokens": [CONTROL[0]]}},
    }
