"""Opens the index of a folder and repairs every difference between the index and the files."""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from rekindle.errors import CorruptBlock, IndexDamaged
from rekindle.kvcache.block import packed_chain_key
from rekindle.kvcache.disk.block_files import BlockFiles
from rekindle.kvcache.disk.entry_table import (
    BlockRow,
    Change,
    DropBlock,
    EntryRow,
)
from rekindle.kvcache.disk.index_db import BACKUP, SIDECARS, IndexDb, beside, publish

DAMAGED = ".damaged"


@dataclass(frozen=True, slots=True)
class Recovery:
    """What was found and repaired while a folder was opened."""

    adopted: int = 0  # files that were missing in the index, or different there
    lost: int = 0  # rows whose block cannot be reached any more
    quarantined: int = 0  # bad files
    removed: int = 0  # files that no chain leads to
    rebuilt: bool = False  # the index was damaged or missing
    restored_from_backup: bool = False
    damage: str = field(default="", compare=False)  # why the old index could not be used
    set_aside: Path | None = field(default=None, compare=False)  # where the old index is now


@dataclass(frozen=True, slots=True)
class Census:
    """The differences between index and files."""

    adopted: tuple[BlockRow, ...]  # parents first
    lost: tuple[bytes, ...]
    unreachable: tuple[bytes, ...]  # good files that no chain leads to
    changes: tuple[Change, ...]  # that repair the index


def compare(rows: Iterable[BlockRow], found: Mapping[bytes, BlockRow]) -> Census:
    """Compare the rows with the blocks that were found in files. Changes nothing."""
    known = {row.key: row for row in rows}
    reached = {row.key: row for row in reachable(found)}
    adopted = tuple(row for key, row in reached.items() if not _agree(known.get(key), row))
    lost = tuple(key for key in known if key not in reached)
    changes: tuple[Change, ...] = (*map(DropBlock, lost), *adopted)
    kept = [reached[key] for key in known if key in reached]
    if not _is_in_order([*kept, *(row for row in adopted if row.key not in known)]):
        changes = (*map(DropBlock, known), *reached.values())
    unreachable = tuple(key for key in found if key not in reached)
    return Census(adopted, lost, unreachable, changes)


def _agree(known: BlockRow | None, found: BlockRow) -> bool:
    """A block that was replaced by an exact one just before a crash is better than its row."""
    return known is not None and (known == found or known._replace(kind=known.kind | 1) == found)


def _is_in_order(rows: Iterable[BlockRow]) -> bool:
    """Whether parents come before their children, as loading requires."""
    seen: set[bytes] = set()
    for row in rows:
        if row.parent != row.namespace and row.parent not in seen:
            return False
        seen.add(row.key)
    return True


def reachable(found: Mapping[bytes, BlockRow]) -> list[BlockRow]:
    """The blocks whose chain leads to their namespace, parents first."""
    children: dict[bytes, list[BlockRow]] = defaultdict(list)
    for row in found.values():
        children[row.parent].append(row)
    reached = [row for row in found.values() if row.parent == row.namespace]
    for row in reached:  # the list grows while it is walked
        reached.extend(child for child in children[row.key] if child.namespace == row.namespace)
    return reached


@dataclass(slots=True)
class OpenIndex:
    """An index and its rows, which are read only once because there may be millions."""

    index_db: IndexDb
    blocks: list[BlockRow]
    entries: list[EntryRow]
    is_new: bool = False  # it replaces an index that was damaged or missing
    is_restored: bool = False  # from the backup
    damage: str = ""  # why the old index could not be used


def recover(block_files: BlockFiles, index: Path) -> tuple[OpenIndex, Recovery]:
    """Open or create the index, and make it agree with the files."""
    opened = open_index(index)
    try:
        done = reconcile(block_files, opened)
    except BaseException:
        opened.index_db.close()
        raise
    rebuilt = opened.is_new and bool(opened.damage or opened.is_restored or done.adopted)
    return opened, replace(
        done,
        rebuilt=rebuilt,
        restored_from_backup=opened.is_restored,
        damage=opened.damage,
        set_aside=beside(index, DAMAGED) if opened.damage else None,
    )


def reconcile(block_files: BlockFiles, opened: OpenIndex) -> Recovery:
    """Compare index and files by names, sizes and headers, and repair every difference. After a
    clean shutdown only names are compared, and a bad file is detected when it is read."""
    keys, impostors = block_files.tidy()
    sizes = None if opened.index_db.begin_use() else block_files.sizes()
    if _agree_wholly(opened.blocks, keys, sizes):
        return Recovery(quarantined=impostors)
    sizes = block_files.sizes() if sizes is None else sizes
    found, bad = _inspect(block_files, {row.key: row for row in opened.blocks}, sizes)
    census = compare(opened.blocks, found)
    repair_index(block_files, opened.index_db, census, bad)
    opened.blocks = opened.index_db.blocks()
    return Recovery(
        adopted=len(census.adopted),
        lost=len(census.lost),
        quarantined=impostors + len(bad),
        removed=len(census.unreachable),
    )


def _agree_wholly(
    rows: Sequence[BlockRow], keys: Set[bytes], sizes: Mapping[bytes, int] | None
) -> bool:
    """Whether nothing needs repair, which is the common case. Checks millions in seconds."""
    if len(rows) != len(keys):
        return False
    seen: set[bytes] = set()
    for key, parent, namespace, packed, size_bytes, _ in rows:
        if key not in keys or packed_chain_key(parent, packed) != key:
            return False
        if sizes is not None and sizes.get(key) != size_bytes:
            return False
        if parent != namespace and parent not in seen:
            return False
        seen.add(key)
    return True


def _inspect(
    block_files: BlockFiles, rows: Mapping[bytes, BlockRow], sizes: Mapping[bytes, int]
) -> tuple[dict[bytes, BlockRow], list[bytes]]:
    """The block in each file according to its header, and the keys of bad files.

    A file with another size than its row may be good. A block is replaced by renaming, and the
    process may have ended before the row was changed.
    """
    found, bad = {}, []
    for key, size_bytes in sizes.items():
        row = rows.get(key)
        is_known = row is not None and row.size_bytes == size_bytes
        if row and is_known and packed_chain_key(row.parent, row.packed) == key:
            found[key] = row
            continue
        try:
            header, tokens, size_bytes = block_files.tentative(key)
        except CorruptBlock:
            bad.append(key)
        else:
            found[key] = BlockRow.of(key, header, tokens, size_bytes)
    return found, bad


def repair_index(
    block_files: BlockFiles, index_db: IndexDb, census: Census, bad: Iterable[bytes]
) -> None:
    """Make the index agree with the files. Bad and unreachable files are removed."""
    index_db.commit(census.changes)  # first, because a file without a row is harmless
    for key in bad:
        block_files.quarantine(key)
    block_files.remove(census.unreachable)


def open_index(index: Path) -> OpenIndex:
    """Open the index, or its backup, or a new one."""
    damage = ""
    if _exists(index):
        try:
            return open_readable(index)
        except IndexDamaged as error:
            damage = str(error)
            set_aside(index)
    _remove_sidecars(index)  # SQLite would replay a leftover log into the next index
    if _exists(beside(index, BACKUP)):
        try:
            _copy_backup(index)
            opened = open_readable(index)
            return replace(opened, is_new=True, is_restored=True, damage=damage)
        except IndexDamaged:
            _remove(index)
            _remove_sidecars(index)
    return OpenIndex(IndexDb(index), [], [], is_new=True, damage=damage)


def open_readable(index: Path) -> OpenIndex:
    """Open an index and read every row of it."""
    index_db = IndexDb(index)
    try:
        return OpenIndex(index_db, index_db.blocks(), index_db.entries())
    except BaseException:
        index_db.close()
        raise


def set_aside(index: Path) -> None:
    """Rename an index that cannot be used. Only the latest one is kept."""
    damaged = beside(index, DAMAGED)
    _remove(damaged)
    index.rename(damaged)
    _remove_sidecars(index)


def _copy_backup(index: Path) -> None:
    new = beside(index, ".tmp")
    _remove(new)
    backup = beside(index, BACKUP)
    if backup.is_symlink() or not backup.is_file():
        raise IndexDamaged("it is not a regular file")
    new.touch(mode=0o600)
    shutil.copyfile(backup, new)
    publish(new, index)


def _remove_sidecars(index: Path) -> None:
    for suffix in SIDECARS:
        _remove(beside(index, suffix))


def _remove(path: Path) -> None:
    """Remove an item of any type; a link, not its target."""
    with suppress(FileNotFoundError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _exists(path: Path) -> bool:
    return path.is_symlink() or path.exists()
