"""The precision of a turn's KV state: which cells it has, and from which position on."""

from __future__ import annotations

from dataclasses import dataclass

from rekindle.engine.base import Capabilities, KvType
from rekindle.errors import ModelError, Unsupported
from rekindle.kvcache.block import kv_namespace
from rekindle.protocol.requests import GenerateRequest

DEFAULT_GROUP_SIZE = 64  # where an engine has several sizes of groups, and this one


@dataclass(frozen=True, slots=True)
class KvSpace:
    """Where state lies: in the engine in cells of a type, in the store under a namespace."""

    kv_type: KvType
    namespace: bytes


@dataclass(frozen=True, slots=True)
class Precision:
    """State has the usual cells until a sequence goes beyond its first `start_tokens`; then all of
    it is written again in quantised ones, and what follows is computed with those."""

    usual: KvSpace
    quantised: KvSpace | None = None  # None: it never changes
    start_tokens: int = 0
    may_transcode: bool = True  # from the usual cells; False: those hold less

    @property
    def first(self) -> KvSpace:
        """Where the state of a short sequence is."""
        return self.usual if self.quantised is None or self.start_tokens else self.quantised

    def crosses(self, tokens: int) -> bool:
        """Whether a sequence of so many tokens has quantised cells."""
        return self.space_of(tokens) != self.usual

    def space_of(self, tokens: int) -> KvSpace:
        """Where the state of a sequence of so many tokens is."""
        if self.quantised is None or tokens <= self.start_tokens:
            return self.usual
        return self.quantised


def precision(request: GenerateRequest, capabilities: Capabilities, tenant: bytes) -> Precision:
    """What a request asks for; raises Unsupported. The start is part of the namespace: a step ends
    there, and what follows is computed otherwise, however a prompt is divided."""
    usual = KvSpace(capabilities.kv_type, tenant)
    is_shared = request.prepare is not None and request.prepare.shared  # turns of all kinds start
    bits = None if is_shared else request.kv_bits  # from it
    kv_type = _kv_type(capabilities, bits, request.kv_group_size)
    if kv_type == capabilities.kv_type:
        return Precision(usual)
    holds_more = capabilities.kv[kv_type].bits >= capabilities.kv_layout.bits
    start_tokens = 0 if holds_more else request.kv_quantization_start
    namespace = kv_namespace(tenant, capabilities.kv[kv_type].fingerprint, start_tokens)
    return Precision(usual, KvSpace(kv_type, namespace), start_tokens, not holds_more)


def check_kv_bits(capabilities: Capabilities, bits: int | None) -> None:
    """Raise ModelError where the server's own default cannot be."""
    if bits is not None and bits not in _known_bits(capabilities):
        raise ModelError(f"{_refusal(capabilities, bits)}: leave --kv-bits out")


def _kv_type(capabilities: Capabilities, bits: int | None, group_size: int | None) -> KvType:
    """The KV type of so many bits in groups of so many values; raises Unsupported. Where an engine
    has one size of groups, that is it, whatever was asked for: answers say which it is."""
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
            f"KV cells of {bits} bits have groups of {known} values in this model, not of "
            f"{group_size}: leave `kv_group_size` out or send one of these",
            param="kv_group_size",
        )
    if bits == capabilities.kv_layout.bits:
        return capabilities.kv_type
    return groups.get(DEFAULT_GROUP_SIZE) or [*groups.values()][-1]


def _known_bits(capabilities: Capabilities) -> set[int]:
    return {layout.bits for layout in capabilities.kv.values()}


def _refusal(capabilities: Capabilities, bits: int) -> str:
    known = " or ".join(map(str, sorted(_known_bits(capabilities))))
    return f"this model's KV cells cannot have {bits} bits, but {known}"
