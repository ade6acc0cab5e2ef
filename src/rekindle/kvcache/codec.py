"""A block as one record of bytes that proves itself, for the tiers outside our own memory.

Layout: magic, payload length, parent key, namespace, kind, token count, tokens, state; then a
keyed BLAKE3 over all of it, where a large state is represented by the keyed BLAKE3s of its stripes:
several threads can each verify what they have just read. Nothing is believed before the whole
record has been verified: a header is read before that only to know how much there is to verify, or
what a lost index may have held.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from blake3 import blake3

from rekindle.errors import CorruptBlock
from rekindle.kvcache.block import KEY_BYTES
from rekindle.tokens import TOKEN_BYTES, Tokens

Buffer = bytes | bytearray | memoryview

MAGIC = b"RKB1"
STRIPED_MAGIC = b"RKB2"  # its state is hashed in stripes
STRIPED_BYTES = 16 << 20  # of state: from here on it is written so; below, a core does all of it
STRIPE_BYTES = 4 << 20  # part of the format
MAC_BYTES = 32
SHARED_BYTES = 64 << 20  # a record that is not in stripes is hashed by all cores from here on
MOST_TOKENS = 1 << 20  # of a block: whoever believes a header allocates no more than 4 MiB for them
_HEADER = struct.Struct(f">4sQ{KEY_BYTES}s{KEY_BYTES}sBI")
HEADER_BYTES = _HEADER.size
_CONTEXT = "rekindle cache block record 1"
_STRIPE_CONTEXT = "rekindle cache block stripe 1"


@dataclass(frozen=True, slots=True)
class Record:
    """A block with everything needed to find its place again."""

    namespace: bytes
    parent: bytes
    tokens: Tokens
    blob: Buffer
    exact: bool
    resumable: bool = False


@dataclass(frozen=True, slots=True)
class Header:
    """What a record says of itself; no more than a claim until the record is verified."""

    magic: bytes
    blob_bytes: int
    parent: bytes
    namespace: bytes
    exact: bool
    resumable: bool
    tokens: int

    @property
    def is_striped(self) -> bool:
        return self.magic == STRIPED_MAGIC

    @property
    def packed_bytes(self) -> int:
        return self.tokens * TOKEN_BYTES

    @property
    def record_bytes(self) -> int:
        return record_bytes(self.packed_bytes, self.blob_bytes)


def record_bytes(packed_bytes: int, blob_bytes: int) -> int:
    return HEADER_BYTES + packed_bytes + blob_bytes + MAC_BYTES


def seal(record: Record, secret: bytes) -> tuple[Buffer, ...]:
    """The record's parts, to be written one after the other; the state is not copied."""
    packed = record.tokens.packed
    tokens, rest = divmod(len(packed), TOKEN_BYTES)
    if rest or tokens > MOST_TOKENS:
        raise ValueError("these are not the tokens of one block")
    kind, blob = record.exact | record.resumable << 1, record.blob
    magic = STRIPED_MAGIC if len(blob) >= STRIPED_BYTES else MAGIC
    header = _HEADER.pack(magic, len(blob), record.parent, record.namespace, kind, tokens)
    state = _stripe_digests(blob, secret) if magic == STRIPED_MAGIC else (blob,)
    return header, packed, blob, _mac(secret, header, packed, *state)


def parse_header(raw: Buffer) -> Header:
    """What these first bytes of a record claim, or CorruptBlock."""
    if len(raw) < HEADER_BYTES:
        raise CorruptBlock("it is shorter than its header")
    magic, blob_bytes, parent, namespace, kind, tokens = _HEADER.unpack_from(raw)
    if magic not in (MAGIC, STRIPED_MAGIC):
        raise CorruptBlock("it is not a block record")
    if kind > 3 or tokens > MOST_TOKENS:
        raise CorruptBlock("its header makes no sense")
    return Header(magic, blob_bytes, parent, namespace, bool(kind & 1), bool(kind & 2), tokens)


def stripes(blob: Buffer) -> list[tuple[int, memoryview]]:
    """What a state is read in, and hashed in if it is large: each with where it begins."""
    view = memoryview(blob)
    starts = range(0, len(view), STRIPE_BYTES)
    return [(start, view[start : start + STRIPE_BYTES]) for start in starts]


def stripe_digest(stripe: Buffer, secret: bytes) -> bytes:
    """What stands for a stripe in the checksum of its record."""
    return blake3(key=_key(secret, _STRIPE_CONTEXT)).update(stripe).digest()


def _stripe_digests(blob: Buffer, secret: bytes) -> list[bytes]:
    return [stripe_digest(stripe, secret) for _, stripe in stripes(blob)]


def verify(
    header_raw: Buffer,
    packed: Buffer,
    blob: Buffer,
    mac: Buffer,
    secret: bytes,
    digests: Sequence[bytes] | None = None,
) -> Record:
    """The record, or CorruptBlock; never anything in between. `digests` are those of its stripes,
    in their order, for whoever has made them already."""
    header = parse_header(header_raw)
    if (len(packed), len(blob)) != (header.packed_bytes, header.blob_bytes):
        raise CorruptBlock("its length disagrees with its header")
    state: Sequence[Buffer] = (blob,)
    if header.is_striped:
        state = _stripe_digests(blob, secret) if digests is None else digests
    if not hmac.compare_digest(_mac(secret, header_raw, packed, *state), bytes(mac)):
        raise CorruptBlock("its checksum disagrees with its content")
    tokens = Tokens(bytes(packed))
    return Record(header.namespace, header.parent, tokens, blob, header.exact, header.resumable)


def _mac(secret: bytes, *parts: Buffer) -> bytes:
    """Small blocks on one thread: two cores gained nothing below 64 MiB, and lost time at 1 and 16
    MiB. The result is the same."""
    is_large = sum(map(len, parts)) >= SHARED_BYTES
    hasher = blake3(key=_key(secret, _CONTEXT), max_threads=blake3.AUTO if is_large else 1)
    for part in parts:
        hasher.update(part)
    return hasher.digest()


def _key(secret: bytes, context: str) -> bytes:
    """The secret has other uses; a key of its own keeps what they sign apart from blocks."""
    return blake3(secret, derive_key_context=context).digest()
