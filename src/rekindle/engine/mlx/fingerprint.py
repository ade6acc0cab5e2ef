"""What the bytes of a state depend on beside its tokens and KV type, as one hash.

Weights, configuration and adapter; the libraries that compute; what they compute on. Tokenizers
are in it, so that a repaired one starts anew; templates are not, as they change no token's state.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
from blake3 import blake3

from rekindle.models.folder import CONFIG, TOKENIZER, weight_files

ADAPTER_FILES = ("adapter_config.json", "adapters.safetensors")
QUANTISATION = "hf_quant_config.json"  # mlx_lm reads it where the configuration says nothing of it
LIBRARIES = ("mlx", "mlx-lm")


def state_fingerprint(folder: Path, adapter: Path | None) -> bytes:
    files = [folder / CONFIG, folder / TOKENIZER, *weight_files(folder)]
    files += [folder / QUANTISATION] if (folder / QUANTISATION).is_file() else []
    files += [adapter / name for name in ADAPTER_FILES] if adapter else []
    return blake3(repr((_numerics(), len(files))).encode() + b"".join(map(_hash, files))).digest()


def _numerics() -> tuple[str, ...]:
    """The BLAS of a CPU chooses its kernels by the processor, so that its name is in it."""
    versions = tuple(f"{name} {version(name)}" for name in LIBRARIES)
    device = mx.default_device()
    about = mx.device_info(device)
    names = (f"{about.get(key)}" for key in ("architecture", "device_name"))
    return (*versions, str(device), *names)


def _hash(file: Path) -> bytes:
    return blake3(max_threads=blake3.AUTO).update_mmap(file).digest()
