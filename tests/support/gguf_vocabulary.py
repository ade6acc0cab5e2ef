"""Reads the vocabulary of a GGUF file with llama.cpp, or writes it as files of a model folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx

from rekindle.engine.llamacpp import bindings
from rekindle.engine.llamacpp.tokenizer import LlamaTokenizer
from tests.support.tiny_mlx import added_token

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
#: The regular expression before GPT-2's, by llama.cpp's name for the two together.
BEFORE_BYTE_LEVEL = {
    "gpt-2": [],
    "smollm": [{"type": "Digits", "individual_digits": True}],
}


@contextmanager
def llama_tokenizer(path: Path) -> Iterator[LlamaTokenizer]:
    """llama.cpp's tokenizer of a file, loaded without the weights."""
    library: Any = bindings.load_library()
    params = library.llama_model_default_params()
    params.vocab_only = True
    model = library.llama_model_load_from_file(str(path).encode(), params)
    yield LlamaTokenizer(library, model)
    library.llama_model_free(model)


def write_folder_vocabulary(values: dict[str, Any], folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json from the metadata of a byte-level GGUF
    file."""
    tokens, kinds = values["tokenizer.ggml.tokens"], values["tokenizer.ggml.token_type"]
    added = (gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED)
    before = BEFORE_BYTE_LEVEL[values["tokenizer.ggml.pre"]]
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            added_token(token, tokens[token], special=kind == gguf.TokenType.CONTROL)
            for token, kind in enumerate(kinds)
            if kind in added
        ],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*before, BYTE_LEVEL]},
        "decoder": BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "vocab": {text: token for token, text in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in values["tokenizer.ggml.merges"]],
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    about = {
        "bos_token": tokens[values["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[values["tokenizer.ggml.eos_token_id"]],
        "add_bos_token": bool(values.get("tokenizer.ggml.add_bos_token", False)),
        "chat_template": values["tokenizer.chat_template"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(about))


def read_metadata(path: Path) -> dict[str, Any]:
    """The metadata of a GGUF file by name."""
    loaded: Any = mx.load(str(path), return_metadata=True)
    return metadata_of(loaded[1])


def metadata_of(values: dict[str, Any]) -> dict[str, Any]:
    """The same for metadata that MLX has read, as Python values."""
    return {
        name: value.tolist() if isinstance(value, mx.array) else value
        for name, value in values.items()
    }
