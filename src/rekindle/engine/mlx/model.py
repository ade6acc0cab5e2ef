"""Loads a model folder into MLX, and fingerprints its state."""

from __future__ import annotations

import glob
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.utils
from blake3 import blake3
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

from rekindle.engine.base import EngineOptions, OnProgress
from rekindle.errors import ModelError
from rekindle.models.folder import CONFIG, TOKENIZER, check_folder, read_json, weight_files
from rekindle.models.safetensors import tensor_names
from rekindle.protocol.requests import TEXT

ADAPTER_FILES = ("adapter_config.json", "adapters.safetensors")
QUANTISATION = "hf_quant_config.json"  # mlx_lm reads it if the configuration has no quantisation


def state_fingerprint(
    folder: Path,
    adapter: Path | None,
    *,
    files: Seq[Path] = (),
    packages: tuple[str, ...] = (),
) -> bytes:
    """Hash everything but tokens and KV type that the bytes of a state depend on. `files` and
    `packages` are those that only vision uses.

    Includes weights, configuration, adapter, libraries and device. The tokenizer is included, so
    that a repaired one starts anew. Templates are not: they change no state.
    """
    files = [folder / CONFIG, folder / TOKENIZER, *weight_files(folder), *files]
    files += [folder / QUANTISATION] if (folder / QUANTISATION).is_file() else []
    files += [adapter / name for name in ADAPTER_FILES] if adapter else []
    return blake3(
        repr((_numerics(packages), len(files))).encode() + b"".join(map(_hash, files))
    ).digest()


def _numerics(packages: tuple[str, ...]) -> tuple[str, ...]:
    """Name the libraries and the device. The BLAS of a CPU chooses kernels by the processor."""
    versions = tuple(f"{name} {version(name)}" for name in ("mlx", "mlx-lm", *packages))
    device = mx.default_device()
    about = mx.device_info(device)
    names = (f"{about.get(key)}" for key in ("architecture", "device_name"))
    return (*versions, str(device), *names)


def _hash(file: Path) -> bytes:
    return blake3(max_threads=blake3.AUTO).update_mmap(file).digest()


UNLIMITED_TOKENS = 1 << 17  # context of a model that gives no limit, as recurrent ones do
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
CONTEXT_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    model: Any  # of mlx_lm, or something that is called like one
    architecture: str
    parameters: int
    quantization: str  # of its weights: "4bit", or their type
    vocabulary_size: int  # of a row of logits
    context_tokens: int  # the longest it was trained for
    fingerprint: bytes  # of everything but the KV type
    modalities: frozenset[str] = frozenset({TEXT})
    whole_pictures: bool = False  # every vector of a picture attends to all of its others


def load_model(options: EngineOptions, on_progress: OnProgress) -> LoadedModel:
    """Load a model folder with its adapter; raises ModelError."""
    folder = options.path
    check_model(folder, check_folder(folder))
    if options.adapter:
        _check_adapter(options.adapter)
    try:
        model, config = mlx_lm.utils.load_model(folder, lazy=True)
        if options.adapter:
            model = mlx_lm.utils.load_adapters(model, str(options.adapter))
            model.eval()
        read_weights(model, on_progress)
        rows = model(mx.zeros((1, 1), mx.uint32))  # lazy: only its shape is used
    except Exception as error:  # an inconsistent folder may fail anywhere in mlx_lm
        with_adapter = f" with the adapter {options.adapter}" if options.adapter else ""
        raise ModelError(
            f"mlx_lm cannot load {folder.name}{with_adapter}: {one_sentence(error)}. Its "
            "files are damaged or do not belong together, or its architecture is newer than the "
            "installed mlx-lm"
        ) from error
    return LoadedModel(
        model=model,
        architecture=config["model_type"],
        parameters=count_parameters(model),
        quantization=quantisation_of(model, config),
        vocabulary_size=int(rows.shape[-1]),
        context_tokens=first_number(config, CONTEXT_LENGTHS) or UNLIMITED_TOKENS,
        fingerprint=state_fingerprint(folder, options.adapter),
    )


def check_model(folder: Path, tensors: list[str]) -> None:
    """Refuse models that bring code, or whose configuration would exhaust memory."""
    config = read_json(folder / CONFIG)
    if config.get("model_file") is not None or config.get("trust_remote_code"):
        raise ModelError(
            f"{folder.name} contains program code (`model_file` in {CONFIG}), which is never run. "
            "Give a model of an architecture that is built into mlx-lm."
        )
    kind = config.get("model_type")
    if not isinstance(kind, str) or not kind.replace("-", "_").isidentifier():
        raise ModelError(f"{folder / CONFIG} names no `model_type`. Pull the model again.")
    if not (folder / TOKENIZER).is_file():
        raise ModelError(
            f"{folder} has no {TOKENIZER}. Write one with transformers: "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
    if first_number(config, LAYER_COUNTS) > len(tensors):
        raise ModelError(f"{folder / CONFIG} names more layers than there are tensors.")
    if glob.escape(str(folder)) != str(folder):
        raise ModelError(f"mlx_lm cannot load from {folder}: rename it without any of * ? [ ]")


def _check_adapter(adapter: Path) -> None:
    about, weights = (adapter / name for name in ADAPTER_FILES)
    if not about.is_file() or not weights.is_file():
        raise ModelError(
            f"{adapter} is not an adapter: it needs {about.name} and {weights.name}, which "
            "mlx_lm.lora writes"
        )
    read_json(about)
    tensor_names(weights)


def read_weights(model: Module, on_progress: OnProgress) -> None:
    """Read the weights from the files. Until now the arrays are lazy."""
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


def count_parameters(model: Module) -> int:
    """Count quantised weights by the number of values. Returns 0 if that is unknown."""
    try:
        return int(mlx_lm.utils.get_total_parameters(model))
    except Exception:  # an unknown kind of layer; the number is only shown
        return 0


def quantisation_of(model: Module, config: dict[str, Any]) -> str:
    about = config.get("quantization")
    bits = about.get("bits") if isinstance(about, dict) else None
    if bits:
        return f"{bits}bit"
    largest = max(_arrays(model), key=lambda array: array.nbytes)
    return str(largest.dtype).removeprefix("mlx.core.")


def first_number(config: dict[str, Any], names: tuple[str, ...]) -> int:
    """Return the first positive one of these settings, else 0. Looks into the text part too."""
    text = config.get("text_config")
    places = (config, text) if isinstance(text, dict) else (config,)
    found = (place.get(name) for place in places for name in names)
    return next((number for number in found if type(number) is int and number > 0), 0)


def one_sentence(error: Exception) -> str:
    """Return the message as one line of limited length."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300].rstrip(".")
