"""Budgets are hard, and one tenant's flood takes nothing from another's share."""

from __future__ import annotations

from pathlib import Path

MB = 1 << 20
PROMPTS = 10_000
LOOK_EVERY = 500
DISK_BYTES = 6 * MB
RAM_BYTES = 2 * MB
ALICE, BOB = b"alice", b"bob"
PROMISED = list(range(300, 341))
USUAL = list(range(400, 431))


def used_bytes(folder: Path) -> int:
    """What the cache really takes of the disk, everything counted."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())


def prompt(number: int) -> list[int]:
    return [*divmod(number, 900), *range(100, 108)]
