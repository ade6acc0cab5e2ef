"""Defines an encoded request: its tokens, images, lookup, and the KV type of its state."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Literal

from rekindle.chat.message_hashes import ConversationHashes
from rekindle.chat.messages import picture_text
from rekindle.chat.prompt import Prompt
from rekindle.engine.base import Capabilities, KvType
from rekindle.errors import ModelError, Unsupported
from rekindle.kvcache.block import WriteBack, kv_namespace
from rekindle.kvcache.entries.entry import Entry
from rekindle.protocol.events import Reason, Stages
from rekindle.protocol.requests import GenerateRequest, Picture
from rekindle.runtime.schedule.output import ReplyDecoding
from rekindle.tokens import Tokens


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
    is_shared = request.prepare is not None and request.prepare.shared is not False
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


#: Returns the tokens of an image, given its width, its height and its digest.
PictureTokens = Callable[[int, int, bytes], Tokens]


@dataclass(frozen=True, slots=True)
class RequestPictures:
    """The images of one request. Their vectors are cached in `namespace`, which is the tenant's."""

    namespace: bytes = b""
    in_prompt: Mapping[str, Tokens] = field(default_factory=dict)  # by placeholder text
    by_span: Mapping[bytes, Picture] = field(default_factory=dict)  # by the digest of each span

    @classmethod
    def of(
        cls, pictures: Sequence[Picture], picture_tokens: PictureTokens, namespace: bytes
    ) -> RequestPictures:
        """Raises BadRequest for an image that the engine cannot process."""
        in_prompt, by_span = dict[str, Tokens](), dict[bytes, Picture]()
        for picture in pictures:
            tokens = picture_tokens(picture.width, picture.height, picture.digest)
            in_prompt[picture_text(picture.digest.hex())] = tokens
            by_span.update({span.digest: picture for span in tokens.media})
        return cls(namespace, in_prompt, by_span)


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """The messages or the text of a request as tokens."""

    prompt: Prompt
    hashes: ConversationHashes | None = None  # None: the request has no messages
    normalised: list[str] = field(default_factory=list)  # names of the changes made to it


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedRequest(EncodedPrompt):
    """A request with its encoded prompt."""

    request: GenerateRequest
    namespace: bytes  # of the tenant
    groups: tuple[bytes, ...] = ()  # namespaces that are shared with groups of the tenant
    precision: Precision
    decoding: ReplyDecoding
    shown_prompt: str | None = None  # text of the prompt, if the request asks for it
    pictures: RequestPictures = field(default_factory=RequestPictures)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """The result of looking up the names in a request."""

    write_back: WriteBack  # when the state it computes is written to disk
    entry: Entry | None = None  # the entry that one of its names refers to
    problem: Reason | None = None  # why its cache key has no entry
    fingerprint_session: str | None = None  # the session found or created by its fingerprint


Stage = Literal["front", "encode", "queue", "plan", "restore", "compute"]


class Stopwatch:
    """Measures the stages of a turn up to its first token.

    Each lap adds the time since the previous lap to a stage, so the stages add up to the total. The
    clock is the machine's monotonic clock, which the front and the runtime share.
    """

    def __init__(self, received_s: float | None = None) -> None:
        self.stages = Stages()
        self._is_running = True
        self._last_s = time.monotonic() if received_s is None else received_s

    def lap(self, stage: Stage) -> None:
        """Add the time since the last lap. "compute" ends with the first token and is the last."""
        if not self._is_running:
            return
        self._is_running = stage != "compute"
        now_s = time.monotonic()
        setattr(self.stages, stage, getattr(self.stages, stage) + now_s - self._last_s)
        self._last_s = now_s

    def copy(self) -> Stopwatch:
        """Return an independent copy, for one choice of a request."""
        other = copy(self)
        other.stages = copy(self.stages)
        return other
