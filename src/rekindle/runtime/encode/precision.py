"""Chooses the KV type of a turn's state, and the position at which the state is requantised."""

from __future__ import annotations

from dataclasses import dataclass

from rekindle.engine.base import Capabilities, KvType
from rekindle.errors import ModelError, Unsupported
from rekindle.kvcache.block import kv_namespace
from rekindle.protocol.requests import GenerateRequest


@dataclass(frozen=True, slots=True)
class KvFormat:
    """The KV type of state in the engine, and the namespace of its blocks in the store."""

    kv_type: KvType
    namespace: bytes


@dataclass(frozen=True, slots=True)
class Precision:
    """A sequence has the default KV type up to `start_tokens`. When it grows beyond them, all of
    its state is requantised to the target KV type, and the rest is computed with that type.
    """

    default: KvFormat
    target: KvFormat | None = None  # None: the state is never requantised
    start_tokens: int = 0
    # False: the default type has no more bits than the target, so its state is of no use here.
    can_requantise: bool = True

    @property
    def initial(self) -> KvFormat:
        """The format of a sequence with its first tokens."""
        return self.default if self.target is None or self.start_tokens else self.target

    def format_at(self, tokens: int) -> KvFormat:
        """The format of a sequence of this length."""
        if self.target is None or tokens <= self.start_tokens:
            return self.default
        return self.target


def precision(request: GenerateRequest, capabilities: Capabilities, tenant: bytes) -> Precision:
    """Return the precision that a request asks for; raises Unsupported.

    The start is part of the target's namespace. State beyond it depends on where it was
    requantised, so two requests with different starts cannot share it.
    """
    default = KvFormat(capabilities.kv_type, tenant)
    # State that the operator shares has the default type, because all turns can start from it.
    is_shared = request.prepare is not None and request.prepare.shared
    bits = None if is_shared else request.kv_bits
    kv_type = _kv_type(capabilities, bits, request.kv_group_size)
    if kv_type == capabilities.kv_type:
        return Precision(default)
    can_requantise = capabilities.kv[kv_type].bits < capabilities.kv_layout.bits
    start_tokens = request.kv_quantization_start if can_requantise else 0
    namespace = kv_namespace(tenant, capabilities.kv[kv_type].fingerprint, start_tokens)
    return Precision(default, KvFormat(kv_type, namespace), start_tokens, can_requantise)


def check_kv_bits(capabilities: Capabilities, bits: int | None) -> None:
    """Raise ModelError if the model does not support the server's default `kv_bits`."""
    if bits is not None and bits not in _known_bits(capabilities):
        raise ModelError(f"{_refusal(capabilities, bits)}: leave --kv-bits out")


def _kv_type(capabilities: Capabilities, bits: int | None, group_size: int | None) -> KvType:
    """Return the KV type with this many bits and this group size; raises Unsupported.

    If the engine has a single group size, the requested size is ignored. The response reports the
    size that was used.
    """
    if bits is None:
        return capabilities.kv_type
    if bits not in _known_bits(capabilities):
        refusal = _refusal(capabilities, bits)
        raise Unsupported(f"{refusal}: leave `kv_bits` out or send another", param="kv_bits")
    groups = {
        layout.group_size: kv_type
        for kv_type, layout in capabilities.kv.items()
        if layout.bits == bits
    }
    if group_size in groups:
        return groups[group_size]
    if group_size is not None and len(groups) > 1:
        known = " or ".join(str(each) for each in sorted(each or 1 for each in groups))
        raise Unsupported(
            f"this model's KV cache supports groups of {known} values at {bits} bits, not "
            f"{group_size}: leave `kv_group_size` out or send one of these",
            param="kv_group_size",
        )
    if bits == capabilities.kv_layout.bits:
        return capabilities.kv_type
    return groups.get(64) or [*groups.values()][-1]  # 64 is the default of MLX


def _known_bits(capabilities: Capabilities) -> set[int]:
    return {layout.bits for layout in capabilities.kv.values()}


def _refusal(capabilities: Capabilities, bits: int) -> str:
    known = " or ".join(map(str, sorted(_known_bits(capabilities))))
    return f"this model's KV cache supports {known} bits, not {bits}"
