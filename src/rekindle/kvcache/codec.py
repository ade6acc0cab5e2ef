"""Encodes a block as an authenticated record of bytes, and verifies it, for tiers outside RAM.

Layout: magic, payload length, parent key, namespace, kind, token count, tokens, state, MAC. The MAC
is a keyed BLAKE3 over everything before it. A large state is represented in it by the keyed BLAKE3s
of its stripes, so several threads can verify the stripes that they read. A header is used before
verification only to know how much to read, or to rebuild a lost index.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from blake3 import blake3

from rekindle.errors import CorruptBlock
from rekindle.kvcache.block import KEY_BYTES
from rekindle.memory import Buffer
from rekindle.tokens import TOKEN_BYTES, Tokens

MAGIC = b"RKB1"
STRIPED_MAGIC = b"RKB2"  # the state is hashed in stripes
MIN_STRIPED_BYTES = 16 << 20  # a smaller state is written in one piece
STRIPE_BYTES = 4 << 20  # part of the format
MAC_BYTES = 32
PARALLEL_HASH_BYTES = 64 << 20  # larger records without stripes are hashed on all cores
MAX_TOKENS = 1 << 20  # of a block; limits what a forged header can allocate to 4 MiB
_HEADER = struct.Struct(f">4sQ{KEY_BYTES}s{KEY_BYTES}sBI")
HEADER_BYTES = _HEADER.size
_CONTEXT = "rekindle cache block record 1"
_STRIPE_CONTEXT = "rekindle cache block stripe 1"


@dataclass(frozen=True, slots=True)
class Record:
    """A block with its place in the tree."""

    namespace: bytes
    parent: bytes
    tokens: Tokens
    blob: Buffer
    exact: bool
    resumable: bool = False


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """The header of a record. It is not trusted until the record is verified."""

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
    """The parts of the record in the order to write them. The state is not copied."""
    packed = record.tokens.packed
    tokens, rest = divmod(len(packed), TOKEN_BYTES)
    if rest or tokens > MAX_TOKENS:
        raise ValueError("these are not the tokens of one block")
    kind, blob = record.exact | record.resumable << 1, record.blob
    magic = STRIPED_MAGIC if len(blob) >= MIN_STRIPED_BYTES else MAGIC
    header = _HEADER.pack(magic, len(blob), record.parent, record.namespace, kind, tokens)
    state = _stripe_digests(blob, secret) if magic == STRIPED_MAGIC else (blob,)
    return header, packed, blob, _mac(secret, header, packed, *state)


def parse_header(raw: Buffer) -> RecordHeader:
    """Parse the first bytes of a record, or raise CorruptBlock."""
    if len(raw) < HEADER_BYTES:
        raise CorruptBlock("it is shorter than its header")
    magic, blob_bytes, parent, namespace, kind, tokens = _HEADER.unpack_from(raw)
    if magic not in (MAGIC, STRIPED_MAGIC):
        raise CorruptBlock("it is not a block record")
    if kind > 3 or tokens > MAX_TOKENS:
        raise CorruptBlock("its header makes no sense")
    return RecordHeader(
        magic, blob_bytes, parent, namespace, bool(kind & 1), bool(kind & 2), tokens
    )


def stripes(blob: Buffer) -> list[tuple[int, memoryview]]:
    """The stripes in which a state is read, and hashed if it is large, each with its offset."""
    view = memoryview(blob)
    starts = range(0, len(view), STRIPE_BYTES)
    return [(start, view[start : start + STRIPE_BYTES]) for start in starts]


def stripe_digest(stripe: Buffer, secret: bytes) -> bytes:
    """The hash that represents a stripe in the MAC of its record."""
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
    """Return the record, or raise CorruptBlock. `digests` are those of its stripes, in order, if
    the caller has computed them already."""
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
    """A second core gained nothing below 64 MiB, and lost time at 1 and 16 MiB."""
    is_large = sum(map(len, parts)) >= PARALLEL_HASH_BYTES
    hasher = blake3(key=_key(secret, _CONTEXT), max_threads=blake3.AUTO if is_large else 1)
    for part in parts:
        hasher.update(part)
    return hasher.digest()


def _key(secret: bytes, context: str) -> bytes:
    """Derive a key for this context, because the secret has other uses."""
    return blake3(secret, derive_key_context=context).digest()
