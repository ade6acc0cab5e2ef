"""How the RAM and the disk that a model's cache may take are divided among what it keeps."""

from __future__ import annotations

from dataclasses import dataclass

from rekindle.engine.base import Capabilities

MOST_QUEUE_BYTES = 128 << 20  # blocks that wait to be written
QUEUED_BLOCKS = 8  # but so many of them in any case
LEAST_QUEUE_BYTES = 16 << 20
QUEUE_SHARE = 8  # of the RAM budget, what they may take at most
MOST_FETCH_BYTES = 256 << 20  # blocks that are being read, or wait to be restored
FETCHED_BLOCKS = 16  # but so many of them in any case
FETCH_SHARE = 8  # of the RAM budget, what they may take at most
PICTURES_SHARE = 16  # of it, and of the disk budget, what encoded pictures may take
ENTRIES_SHARE = 8  # of it, what entries may take
LEAST_ENTRIES_BYTES = 16 << 20
ENTRIES_DISK_SHARE = 64  # of the disk budget, what they may take of the index
LEAST_ENTRIES_DISK_BYTES = 256 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class RamShares:
    blocks_bytes: int
    queue_bytes: int
    fetch_bytes: int
    pictures_bytes: int
    entries_bytes: int  # beside the budget: it is of state

    @classmethod
    def of(cls, ram_bytes: int, capabilities: Capabilities, *, has_disk: bool) -> RamShares:
        block_bytes = capabilities.kv_layout.cells_bytes(capabilities.block_tokens)
        queue_bytes = max(LEAST_QUEUE_BYTES, ram_bytes // QUEUE_SHARE)
        queue_bytes = min(max(MOST_QUEUE_BYTES, QUEUED_BLOCKS * block_bytes), queue_bytes)
        fetch_bytes = max(MOST_FETCH_BYTES, FETCHED_BLOCKS * block_bytes)
        fetch_bytes = min(fetch_bytes, ram_bytes // FETCH_SHARE)
        if not has_disk:
            queue_bytes = fetch_bytes = 0
        pictures_bytes = ram_bytes // PICTURES_SHARE if capabilities.sees else 0
        return cls(
            blocks_bytes=max(ram_bytes - queue_bytes - fetch_bytes - pictures_bytes, 0),
            queue_bytes=queue_bytes,
            fetch_bytes=fetch_bytes,
            pictures_bytes=pictures_bytes,
            entries_bytes=max(ram_bytes // ENTRIES_SHARE, LEAST_ENTRIES_BYTES),
        )


def index_bytes(disk_bytes: int) -> int:
    """What entries may take of the index on disk."""
    return max(disk_bytes // ENTRIES_DISK_SHARE, LEAST_ENTRIES_DISK_BYTES)
