"""A model folder in MLX's memory: its weights, and what they say about themselves."""

from __future__ import annotations

import glob
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.utils
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

from rekindle.engine.base import EngineOptions, OnProgress
from rekindle.engine.mlx.fingerprint import ADAPTER_FILES, state_fingerprint
from rekindle.errors import ModelError
from rekindle.models.folder import CONFIG, TOKENIZER, check_folder, read_json
from rekindle.models.safetensors import tensor_names

UNLIMITED_TOKENS = 1 << 17  # context of a model that gives no limit, as recurrent ones do
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
CONTEXT_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Weights in memory, with whatever of their settings others ask for."""

    model: Module
    architecture: str
    parameters: int
    quantization: str  # of its weights: "4bit", or their type
    vocabulary_size: int  # of a row of logits
    context_tokens: int  # the longest it was trained for
    fingerprint: bytes  # states are interchangeable only between equal fingerprints


def load_model(options: EngineOptions, on_progress: OnProgress) -> LoadedModel:
    """The model of a folder, with its adapter; raises ModelError when there is none to be had."""
    folder = options.path
    _check(folder, check_folder(folder))
    if options.adapter:
        _check_adapter(options.adapter)
    try:
        model, config = mlx_lm.utils.load_model(folder, lazy=True)
        if options.adapter:
            model = mlx_lm.utils.load_adapters(model, str(options.adapter))
            model.eval()
        _read_weights(model, on_progress)
        rows = model(mx.zeros((1, 1), mx.uint32))  # never computed: its shape is known without
    except Exception as error:  # of any kind: a folder that lies may fail anywhere in mlx_lm
        raise ModelError(
            f"mlx_lm cannot load {folder.name}{_with(options.adapter)}: {_sentence(error)}. Its "
            "files are damaged or do not belong together, or its architecture is newer than the "
            "installed mlx-lm"
        ) from error
    return LoadedModel(
        model=model,
        architecture=config["model_type"],
        parameters=_parameters(model),
        quantization=_quantization(model, config),
        vocabulary_size=int(rows.shape[-1]),
        context_tokens=_number(config, CONTEXT_LENGTHS) or UNLIMITED_TOKENS,
        fingerprint=state_fingerprint(folder, options.adapter),
    )


def _check(folder: Path, tensors: list[str]) -> None:
    """Refuse what mlx_lm would run, or run out of memory on."""
    config = read_json(folder / CONFIG)
    if config.get("model_file") is not None or config.get("trust_remote_code"):
        raise ModelError(
            f"{folder.name} brings program code of its own (`model_file` in {CONFIG}), which is "
            "never run. Give a model of an architecture that mlx-lm has built in."
        )
    kind = config.get("model_type")
    if not isinstance(kind, str) or not kind.replace("-", "_").isidentifier():
        raise ModelError(f"{folder / CONFIG} names no `model_type`. Pull the model again.")
    if not (folder / TOKENIZER).is_file():
        raise ModelError(
            f"{folder} has no {TOKENIZER}. Write one with transformers: "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
    if _number(config, LAYER_COUNTS) > len(tensors):
        raise ModelError(f"{folder / CONFIG} tells of more layers than there are tensors.")
    if glob.escape(str(folder)) != str(folder):
        raise ModelError(f"mlx_lm cannot load from {folder}: rename it without any of * ? [ ]")


def _check_adapter(adapter: Path) -> None:
    about, weights = (adapter / name for name in ADAPTER_FILES)
    if not about.is_file() or not weights.is_file():
        raise ModelError(
            f"{adapter} is no adapter: it needs {about.name} and {weights.name}, as mlx_lm.lora "
            "writes them"
        )
    read_json(about)
    tensor_names(weights)


def _read_weights(model: Module, on_progress: OnProgress) -> None:
    """Bring the weights, which so far are promises, from the files."""
    arrays = _arrays(model)
    total_bytes = sum(array.nbytes for array in arrays)
    done_bytes = 0
    for array in arrays:
        mx.eval(array)
        done_bytes += array.nbytes
        on_progress(done_bytes / total_bytes)


def _arrays(model: Module) -> list[mx.array]:
    named: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    return list(named.values())


def _parameters(model: Module) -> int:
    """Quantised weights count as many as they stand for; 0 where that is not known."""
    try:
        return int(mlx_lm.utils.get_total_parameters(model))
    except Exception:  # a layer of a kind of its own: the number is for people alone
        return 0


def _quantization(model: Module, config: dict[str, Any]) -> str:
    about = config.get("quantization")
    bits = about.get("bits") if isinstance(about, dict) else None
    if bits:
        return f"{bits}bit"
    largest = max(_arrays(model), key=lambda array: array.nbytes)
    return str(largest.dtype).removeprefix("mlx.core.")


def _number(config: dict[str, Any], names: tuple[str, ...]) -> int:
    """The first of these numbers that the model gives, of its text part where it has one; else
    0."""
    text = config.get("text_config")
    places = (config, text) if isinstance(text, dict) else (config,)
    found = (place.get(name) for place in places for name in names)
    return next((number for number in found if type(number) is int and number > 0), 0)


def _with(adapter: Path | None) -> str:
    return f" with the adapter {adapter}" if adapter else ""


def _sentence(error: Exception) -> str:
    """What it says, in one line of bounded length."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300].rstrip(".")
