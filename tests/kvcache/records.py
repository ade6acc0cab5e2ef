"""Chains of records, and ways to damage stored ones."""

from __future__ import annotations

import random
from pathlib import Path

from rekindle.kvcache.block import chain_key, namespace
from rekindle.kvcache.codec import Record, record_bytes
from rekindle.kvcache.disk.entry_table import BlockRow, EntryRow
from rekindle.tokens import Tokens, pack

ROOT = namespace(b"model", b"tenant", 4)
SECRET = b"s" * 32


def chain(count: int, *, root: bytes = ROOT, seed: int = 0, blob_bytes: int = 100) -> list[Record]:
    """A chain of blocks that differs for each seed."""
    chance = random.Random(seed)
    parent, records = root, []
    for _ in range(count):
        tokens = Tokens.of([chance.randrange(1000) for _ in range(4)])
        records.append(Record(root, parent, tokens, chance.randbytes(blob_bytes), exact=False))
        parent = chain_key(parent, tokens)
    return records


def key_of(record: Record) -> bytes:
    return chain_key(record.parent, record.tokens)


def size_of(record: Record) -> int:
    return record_bytes(len(record.tokens.packed), len(record.blob))


def row_of(record: Record) -> BlockRow:
    return BlockRow(
        key=key_of(record),
        parent=record.parent,
        namespace=record.namespace,
        packed=record.tokens.packed,
        size_bytes=size_of(record),
        kind=record.exact | record.resumable << 1,
    )


def entry(key: str, *, pinned: bool = False, names: tuple[tuple[str, str], ...] = ()) -> EntryRow:
    return EntryRow(
        key=key,
        namespace=ROOT,
        packed=pack([1, 2, 3]),
        text=b"hello",
        segments=(("system", "ab"), ("turn", "cd")),
        created_at=1.5,
        last_used_at=2.5,
        ttl_s=None if pinned else 1800.0,
        expires_at=None if pinned else 1802.5,
        pinned=pinned,
        hits=3,
        keyed=True,
        names=names,
    )


def flip(path: Path, offset: int, mask: int = 1) -> None:
    raw = bytearray(path.read_bytes())
    raw[offset] ^= mask
    path.write_bytes(raw)
