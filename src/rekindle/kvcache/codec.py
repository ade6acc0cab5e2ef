"""A block as one record of bytes that proves itself, for the tiers outside our own memory.

Layout: magic, payload length, parent key, namespace, kind, token count, tokens, state; then a
keyed BLAKE3 over all of it. Nothing is believed before the whole record has been verified: a header
is read before that only to know how much there is to verify, or what a lost index may have held.
"""

from __future__ import annotations

import hmac
import struct
from dataclasses import dataclass

from blake3 import blake3

from rekindle.errors import CorruptBlock
from rekindle.kvcache.block import KEY_BYTES
from rekindle.tokens import TOKEN_BYTES, Tokens

Buffer = bytes | bytearray | memoryview

MAGIC = b"RKB1"
MAC_BYTES = 32
SHARED_BYTES = 64 << 20  # from here on a record is hashed by all cores
MOST_TOKENS = 1 << 20  # of a block: whoever believes a header allocates no more than 4 MiB for them
_HEADER = struct.Struct(f">4sQ{KEY_BYTES}s{KEY_BYTES}sBI")
HEADER_BYTES = _HEADER.size
_CONTEXT = "rekindle cache block record 1"


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
    kind = record.exact | record.resumable << 1
    header = _HEADER.pack(MAGIC, len(record.blob), record.parent, record.namespace, kind, tokens)
    mac = _mac(secret, header, packed, record.blob)
    return header, packed, record.blob, mac


def parse_header(raw: Buffer) -> Header:
    """What these first bytes of a record claim, or CorruptBlock."""
    if len(raw) < HEADER_BYTES:
        raise CorruptBlock("it is shorter than its header")
    magic, blob_bytes, parent, namespace, kind, tokens = _HEADER.unpack_from(raw)
    if magic != MAGIC:
        raise CorruptBlock("it is not a block record")
    if kind > 3 or tokens > MOST_TOKENS:
        raise CorruptBlock("its header makes no sense")
    return Header(magic, blob_bytes, parent, namespace, bool(kind & 1), bool(kind & 2), tokens)


def verify(header_raw: Buffer, packed: Buffer, blob: Buffer, mac: Buffer, secret: bytes) -> Record:
    """The record, or CorruptBlock; never anything in between."""
    header = parse_header(header_raw)
    if (len(packed), len(blob)) != (header.packed_bytes, header.blob_bytes):
        raise CorruptBlock("its length disagrees with its header")
    if not hmac.compare_digest(_mac(secret, header_raw, packed, blob), bytes(mac)):
        raise CorruptBlock("its checksum disagrees with its content")
    tokens = Tokens(bytes(packed))
    return Record(header.namespace, header.parent, tokens, blob, header.exact, header.resumable)


def _mac(secret: bytes, *parts: Buffer) -> bytes:
    """Small blocks on one thread: two cores gained nothing below 64 MiB, and lost time at 1 and 16
    MiB. The result is the same."""
    # The secret has other uses; a key of its own keeps what they sign apart from blocks.
    key = blake3(secret, derive_key_context=_CONTEXT).digest()
    is_large = sum(map(len, parts)) >= SHARED_BYTES
    hasher = blake3(key=key, max_threads=blake3.AUTO if is_large else 1)
    for part in parts:
        hasher.update(part)
    return hasher.digest()
