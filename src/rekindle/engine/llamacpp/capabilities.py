"""What a model can do as it is loaded here."""

from __future__ import annotations

from rekindle.engine.base import Capabilities, Device, EngineOptions, KvLayout
from rekindle.engine.llamacpp.fingerprint import Numerics, state_fingerprint, weights_digest
from rekindle.engine.llamacpp.gpus import find_gpus
from rekindle.engine.llamacpp.layouts import BITS
from rekindle.engine.llamacpp.model import LlamaModel
from rekindle.engine.llamacpp.sizes import Sizes
from rekindle.engine.llamacpp.state import GROUPS
from rekindle.engine.llamacpp.vision import Projector
from rekindle.protocol.media import IMAGE, TEXT


def describe(
    options: EngineOptions, model: LlamaModel, sizes: Sizes, projector: Projector | None
) -> Capabilities:
    weights = weights_digest(options.path, options.mmproj)
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
        computes_beside=model.on_gpu,
        architecture=model.architecture,
        parameters=model.parameters,
        quantization=model.quantization,
        gpus=tuple(Device(gpu.name, gpu.total_bytes) for gpu in find_gpus(model.library)),
        layers=model.layers + 1,  # + 1: the output layer
        gpu_layers=min(model.gpu_layers(options), model.layers + 1),
    )
