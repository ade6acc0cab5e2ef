"""Describes what a loaded model can do, and fingerprints its KV state.

Two engines with equal fingerprints compute the same bits for the same canonical steps, and store
them in the same layout. State is never exchanged between different fingerprints.
"""

from __future__ import annotations

import re
from dataclasses import astuple, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from blake3 import blake3

from rekindle.engine.base import Capabilities, Device, EngineOptions, KvLayout, KvType
from rekindle.engine.llamacpp import bindings
from rekindle.engine.llamacpp.gpus import find_gpus
from rekindle.engine.llamacpp.model import LlamaModel
from rekindle.engine.llamacpp.sizes import Sizes
from rekindle.engine.llamacpp.state import BITS, GROUPS
from rekindle.engine.llamacpp.vision import Projector
from rekindle.models.gguf_files import split_names
from rekindle.protocol.frames import DeviceInfo, LibraryInfo
from rekindle.protocol.requests import IMAGE, TEXT

STATE_FORMAT = "llama.cpp state, unified, flash attention, 2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """Everything but the weights that changes the numbers of a state or their layout."""

    state_format: str
    library: bytes  # digest of its files
    #: Instruction sets of the CPU, every other device, and a chosen distribution over GPUs.
    backends: tuple[str, ...]
    gpu_layers: int
    kv_type: KvType
    step_tokens: int  # step boundaries of exact sequences
    rope_factors: str = ""  # of a LongRoPE model

    @classmethod
    def of(
        cls, model: LlamaModel, options: EngineOptions, step_tokens: int, kv_type: KvType
    ) -> Numerics:
        """Collect what the bits of state depend on. They do not depend on thread counts, nor on the
        sizes of contexts and pools."""
        return cls(
            state_format=STATE_FORMAT,
            library=_library_digest(bindings.library_path()),
            backends=(*_backends(model.library), *model.distribution.fingerprint),
            gpu_layers=min(model.gpu_layers(options), model.layers + 1),  # + 1: the output layer
            kv_type=kv_type,
            step_tokens=step_tokens,
            rope_factors=model.rope.factors if model.rope else "",
        )


def weights_digest(path: Path, mmproj: Path | None = None, adapter: Path | None = None) -> bytes:
    """Hash all files of the model. The first file of a split may hold no tensor, another projector
    makes other state of a picture, and an adapter changes the state of everything."""
    files = [path.with_name(name) for name in split_names(path.name)]
    files += [mmproj] if mmproj else []
    digest = _hash(*files)
    return digest if adapter is None else digest + b"adapter" + _hash(adapter)


def state_fingerprint(weights: bytes, numerics: Numerics) -> bytes:
    return blake3(repr(astuple(numerics)).encode() + weights).digest()


def library_files(path: Path) -> list[Path]:
    """List the library and the shared libraries next to it: the kernels are in libggml-*."""
    library = path.resolve()
    is_part = re.compile(r"(llama|ggml).*(\.so|\.dylib$)").search
    siblings = {each.resolve() for each in library.parent.iterdir() if is_part(each.name)}
    return sorted(siblings | {library})


def library_info() -> LibraryInfo:
    library = bindings.load_library()
    return LibraryInfo(
        engine="llama.cpp",
        source=bindings.SOURCES,
        digest=_library_digest(bindings.library_path()).hex()[:16],
        features=library.llama_print_system_info().decode(errors="replace").strip(),
        gpus=tuple(DeviceInfo(gpu.name, gpu.total_bytes) for gpu in find_gpus(library)),
    )


@cache  # a loaded library does not change
def _library_digest(path: Path) -> bytes:
    return _hash(*library_files(path))


def _hash(*files: Path) -> bytes:
    return b"".join(blake3(max_threads=blake3.AUTO).update_mmap(file).digest() for file in files)


def _backends(library: Any) -> tuple[str, ...]:
    """List instruction sets and devices. A GPU without layers counts: it may run large batches."""
    devices = (library.ggml_backend_dev_get(n) for n in range(library.ggml_backend_dev_count()))
    others = (
        library.ggml_backend_dev_name(device) + b" " + library.ggml_backend_dev_description(device)
        for device in devices
        if library.ggml_backend_dev_type(device) != bindings.DEVICE_CPU
    )
    return tuple(
        each.decode(errors="replace") for each in (library.llama_print_system_info(), *others)
    )


def describe(
    options: EngineOptions, model: LlamaModel, sizes: Sizes, projector: Projector | None
) -> Capabilities:
    weights = weights_digest(options.path, options.mmproj, options.adapter)
    return Capabilities(
        block_tokens=sizes.block_tokens,
        step_tokens=sizes.step_tokens,
        context_tokens=sizes.context_tokens,
        batch_tokens=sizes.pool.batch,
        pool_tokens=sizes.pool.cells,
        sequences=sizes.pool.sequences,
        exact_sequences=sizes.exact.contexts,
        can_truncate=model.can_truncate,
        device="gpu" if model.on_gpu else "cpu",
        kv_type=options.kv_type,
        kv={
            kv_type: KvLayout(
                bits=BITS[kv_type],
                group_size=GROUPS[kv_type][0] if BITS[kv_type] < 16 else None,
                header_bytes=state.fixed,
                token_bytes=state.each,
                checkpoint_bytes=state.checkpoint,
                fingerprint=state_fingerprint(
                    weights, Numerics.of(model, options, sizes.step_tokens, kv_type)
                ),
            )
            for kv_type, state in sizes.layouts.items()
        },
        modalities=frozenset({TEXT, IMAGE} if projector else {TEXT}),
        whole_pictures=projector is not None and projector.is_whole,
        async_launch=model.on_gpu,
        architecture=model.architecture,
        parameters=model.parameters,
        quantization=model.quantization,
        gpus=tuple(
            Device(gpu.name, gpu.total_bytes)
            for gpu in find_gpus(model.library, model.distribution.chosen)
        ),
        layers=model.layers + 1,  # + 1: the output layer
        gpu_layers=min(model.gpu_layers(options), model.layers + 1),
    )
