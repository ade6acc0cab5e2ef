"""A block as one record of bytes that proves itself, for the tiers outside our own memory.

Layout: magic, payload length, parent key, namespace, origin, token count, tokens, state; then a
keyed BLAKE3 over all of it. Nothing is believed before the whole record has been verified.
"""

from __future__ import annotations

import hmac
import struct
from dataclasses import dataclass

from blake3 import blake3

from rekindle.cache.key import KEY_BYTES, TOKEN_BYTES
from rekindle.errors import CorruptBlock

MAGIC = b"RKB1"
_HEADER = struct.Struct(f">4sQ{KEY_BYTES}s{KEY_BYTES}s?I")
_MAC_BYTES = 32


@dataclass(frozen=True, slots=True)
class Record:
    """A block with everything needed to find its place again."""

    root: bytes
    parent: bytes
    packed: bytes
    blob: bytes
    exact: bool


def encode(record: Record, secret: bytes) -> bytes:
    tokens = len(record.packed) // TOKEN_BYTES
    header = _HEADER.pack(MAGIC, len(record.blob), record.parent, record.root, record.exact, tokens)
    body = header + record.packed + record.blob
    return body + blake3(body, key=secret).digest()


def decode(raw: bytes, secret: bytes) -> Record:
    """The record, or CorruptBlock; never anything in between."""
    if len(raw) < _HEADER.size + _MAC_BYTES:
        raise CorruptBlock("shorter than its header")
    body, mac = memoryview(raw)[:-_MAC_BYTES], raw[-_MAC_BYTES:]  # the state is copied once
    magic, blob_bytes, parent, root, exact, tokens = _HEADER.unpack_from(body)
    if magic != MAGIC:
        raise CorruptBlock("not a block record")
    if len(body) != _HEADER.size + tokens * TOKEN_BYTES + blob_bytes:
        raise CorruptBlock("its length disagrees with its header")
    if not hmac.compare_digest(blake3(body, key=secret).digest(), mac):
        raise CorruptBlock("its checksum disagrees with its content")
    split = _HEADER.size + tokens * TOKEN_BYTES
    return Record(root, parent, bytes(body[_HEADER.size : split]), bytes(body[split:]), exact)
