"""Bringing index and files back to saying the same, whatever happened to either."""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from rekindle.errors import CorruptBlock, LedgerDamaged
from rekindle.kvcache.disk.block_files import Vault
from rekindle.kvcache.disk.index_db import (
    BACKUP,
    SIDECARS,
    BlockRow,
    Change,
    DropBlock,
    Ledger,
    PutBlock,
    beside,
    publish,
)
from rekindle.kvcache.key import chain_key

DAMAGED = ".damaged"


@dataclass(frozen=True, slots=True)
class Recovery:
    """What opening a folder found and did."""

    adopted: int = 0  # files that the index did not know, or knew otherwise
    lost: int = 0  # rows whose block cannot be reached any more
    aside: int = 0  # bad files set aside
    removed: int = 0  # files that nothing leads to
    rebuilt: bool = False  # the index was damaged or missing
    restored_from_backup: bool = False


@dataclass(frozen=True, slots=True)
class Census:
    """Where index and files disagree."""

    adopted: tuple[BlockRow, ...]  # parents first
    lost: tuple[bytes, ...]
    unreachable: tuple[bytes, ...]  # files, good ones, that no chain leads to
    changes: tuple[Change, ...]  # after which the index is right, and in order


def compare(rows: Iterable[BlockRow], found: Mapping[bytes, BlockRow]) -> Census:
    """Compare what the index says with the blocks that files hold; changes nothing."""
    known = {row.key: row for row in rows}
    reached = {row.key: row for row in _reachable(found)}
    adopted = tuple(row for key, row in reached.items() if not _agree(known.get(key), row))
    lost = tuple(key for key in known if key not in reached)
    changes: tuple[Change, ...] = (*map(DropBlock, lost), *map(PutBlock, adopted))
    kept = [reached[key] for key in known if key in reached]
    if not _is_in_order([*kept, *(row for row in adopted if row.key not in known)]):
        changes = (*map(DropBlock, known), *map(PutBlock, reached.values()))
    unreachable = tuple(key for key in found if key not in reached)
    return Census(adopted, lost, unreachable, changes)


def _agree(known: BlockRow | None, found: BlockRow) -> bool:
    """A block replaced by an exact one just before the end is better than its row says."""
    return known is not None and (known == found or replace(known, exact=True) == found)


def _is_in_order(rows: Iterable[BlockRow]) -> bool:
    """Whether parents come before their children, as whoever loads an index expects."""
    seen: set[bytes] = set()
    for row in rows:
        if row.parent != row.root and row.parent not in seen:
            return False
        seen.add(row.key)
    return True


def _reachable(found: Mapping[bytes, BlockRow]) -> list[BlockRow]:
    """The blocks whose chain leads up to their root, parents first."""
    below: dict[bytes, list[BlockRow]] = defaultdict(list)
    for row in found.values():
        below[row.parent].append(row)
    reached = [row for row in found.values() if row.parent == row.root]
    for row in reached:  # grows as it is walked
        reached.extend(child for child in below[row.key] if child.root == row.root)
    return reached


def recover(vault: Vault, index: Path) -> tuple[Ledger, Recovery]:
    """Open the index, made anew if need be, and have it agree with the files."""
    is_there = _is_there(index)
    ledger, replaced, restored = open_index(index)
    try:
        done = reconcile(vault, ledger)
    except BaseException:
        ledger.close()
        raise
    rebuilt = replaced and (is_there or restored or done.adopted > 0)
    return ledger, Recovery(
        done.adopted, done.lost, done.aside, done.removed, rebuilt, restored_from_backup=restored
    )


def reconcile(vault: Vault, ledger: Ledger) -> Recovery:
    """Compare index and files by sizes and headers alone, and settle every difference."""
    vault.sweep()
    impostors = vault.set_aside_impostors()
    rows = ledger.blocks()
    found, bad = _look(vault, {row.key: row for row in rows})
    census = compare(rows, found)
    settle(vault, ledger, census, bad)
    return Recovery(
        adopted=len(census.adopted),
        lost=len(census.lost),
        aside=impostors + len(bad),
        removed=len(census.unreachable),
    )


def _look(
    vault: Vault, rows: Mapping[bytes, BlockRow]
) -> tuple[dict[bytes, BlockRow], list[bytes]]:
    """What each file holds, as far as a look at it tells; and the bad ones.

    A file of another size than its row's may be good: a block is replaced by renaming, and the
    process may have ended before the row followed.
    """
    found, bad = {}, []
    for key, size_bytes in vault.sizes().items():
        row = rows.get(key)
        if row and row.size_bytes == size_bytes and chain_key(row.parent, row.packed) == key:
            found[key] = row
            continue
        try:
            header, packed, size_bytes = vault.tentative(key)
        except CorruptBlock:
            bad.append(key)
        else:
            found[key] = BlockRow(
                key,
                header.parent,
                header.root,
                packed,
                size_bytes,
                header.exact,
                header.resumable,
            )
    return found, bad


def settle(vault: Vault, ledger: Ledger, census: Census, bad: Iterable[bytes]) -> None:
    """Make the index say what the files say; what is bad or out of reach goes."""
    ledger.commit(census.changes)  # first: a file without a row is found again, and so harmless
    for key in bad:
        vault.set_aside(key)
    vault.remove(census.unreachable)


# -- the index itself ----------------------------------------------------------------------------


def open_index(index: Path) -> tuple[Ledger, bool, bool]:
    """The index; whether it took the place of another; whether that is its backup."""
    if _is_there(index):
        try:
            return open_readable(index), False, False
        except LedgerDamaged:
            put_away(index)
    _remove_sidecars(index)  # a log that outlived its index would be played into the next one
    if _is_there(beside(index, BACKUP)):
        try:
            _copy_backup(index)
            return open_readable(index), True, True
        except LedgerDamaged:
            _remove(index)
            _remove_sidecars(index)
    return Ledger(index), True, False


def open_readable(index: Path) -> Ledger:
    """An index of which every row can be read."""
    ledger = Ledger(index)
    try:
        ledger.blocks()
        ledger.entries()
    except BaseException:
        ledger.close()
        raise
    return ledger


def put_away(index: Path) -> None:
    """Keep a damaged index for a look at it, the latest one only."""
    damaged = beside(index, DAMAGED)
    _remove(damaged)
    index.rename(damaged)
    _remove_sidecars(index)


def _copy_backup(index: Path) -> None:
    new = beside(index, ".tmp")
    _remove(new)
    backup = beside(index, BACKUP)
    if backup.is_symlink() or not backup.is_file():
        raise LedgerDamaged("it is not a regular file")
    new.touch(mode=0o600)
    shutil.copyfile(backup, new)
    publish(new, index)


def _remove_sidecars(index: Path) -> None:
    for suffix in SIDECARS:
        _remove(beside(index, suffix))


def _remove(path: Path) -> None:
    """Whatever is there; a link, not what it points to."""
    with suppress(FileNotFoundError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _is_there(path: Path) -> bool:
    return path.is_symlink() or path.exists()
