"""Bringing index and files back to saying the same, whatever happened to either."""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from rekindle.errors import CorruptBlock, IndexDamaged
from rekindle.kvcache.block import packed_chain_key
from rekindle.kvcache.disk.block_files import BlockFiles
from rekindle.kvcache.disk.entry_table import parse_block
from rekindle.kvcache.disk.index_db import (
    BACKUP,
    SIDECARS,
    BlockRow,
    Change,
    DropBlock,
    EntryRow,
    IndexDb,
    PutBlock,
    RawBlock,
    beside,
    publish,
)

DAMAGED = ".damaged"


@dataclass(frozen=True, slots=True)
class Recovery:
    """What opening a folder found and did."""

    adopted: int = 0  # files that the index did not know, or knew otherwise
    lost: int = 0  # rows whose block cannot be reached any more
    quarantined: int = 0  # bad files taken out of use
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
        if row.parent != row.namespace and row.parent not in seen:
            return False
        seen.add(row.key)
    return True


def _reachable(found: Mapping[bytes, BlockRow]) -> list[BlockRow]:
    """The blocks whose chain leads up to their namespace, parents first."""
    below: dict[bytes, list[BlockRow]] = defaultdict(list)
    for row in found.values():
        below[row.parent].append(row)
    reached = [row for row in found.values() if row.parent == row.namespace]
    for row in reached:  # grows as it is walked
        reached.extend(child for child in below[row.key] if child.namespace == row.namespace)
    return reached


@dataclass(slots=True)
class OpenIndex:
    """An index and what it lists: there may be millions of rows, and they are read once."""

    index_db: IndexDb
    blocks: list[RawBlock]
    entries: list[EntryRow]
    replaced: bool = False  # it took the place of another
    restored: bool = False  # it is the copy of that one


def recover(block_files: BlockFiles, index: Path) -> tuple[OpenIndex, Recovery]:
    """Open the index, made anew if need be, and have it agree with the files."""
    is_there = _is_there(index)
    opened = open_index(index)
    try:
        done = reconcile(block_files, opened)
    except BaseException:
        opened.index_db.close()
        raise
    rebuilt = opened.replaced and (is_there or opened.restored or done.adopted > 0)
    return opened, replace(done, rebuilt=rebuilt, restored_from_backup=opened.restored)


def reconcile(block_files: BlockFiles, opened: OpenIndex) -> Recovery:
    """Compare index and files by names, sizes and headers alone, and repair every difference. After
    a proper end by names: what became of a file since then is found when it is read."""
    keys, impostors = block_files.tidy()
    sizes = None if opened.index_db.begin_use() else block_files.sizes()
    if _agree_wholly(opened.blocks, keys, sizes):
        return Recovery(quarantined=impostors)
    sizes = block_files.sizes() if sizes is None else sizes
    rows = [parse_block(raw) for raw in opened.blocks]
    found, bad = _look(block_files, {row.key: row for row in rows}, sizes)
    census = compare(rows, found)
    repair_index(block_files, opened.index_db, census, bad)
    opened.blocks = opened.index_db.raw_blocks()
    return Recovery(
        adopted=len(census.adopted),
        lost=len(census.lost),
        quarantined=impostors + len(bad),
        removed=len(census.unreachable),
    )


def _agree_wholly(
    rows: Sequence[RawBlock], keys: Set[bytes], sizes: Mapping[bytes, int] | None
) -> bool:
    """Whether there is nothing to repair, as nearly always; millions are looked at in seconds."""
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


def _look(
    block_files: BlockFiles, rows: Mapping[bytes, BlockRow], sizes: Mapping[bytes, int]
) -> tuple[dict[bytes, BlockRow], list[bytes]]:
    """What each file holds, as far as its header shows; and the bad ones.

    A file of another size than its row's may be good: a block is replaced by renaming, and the
    process may have ended before the row followed.
    """
    found, bad = {}, []
    for key, size_bytes in sizes.items():
        row = rows.get(key)
        if row and row.size_bytes == size_bytes and _key(row) == key:
            found[key] = row
            continue
        try:
            header, tokens, size_bytes = block_files.tentative(key)
        except CorruptBlock:
            bad.append(key)
        else:
            found[key] = BlockRow(
                key,
                header.parent,
                header.namespace,
                tokens.packed,
                size_bytes,
                header.exact,
                header.resumable,
            )
    return found, bad


def _key(row: BlockRow) -> bytes:
    return packed_chain_key(row.parent, row.packed)


def repair_index(
    block_files: BlockFiles, index_db: IndexDb, census: Census, bad: Iterable[bytes]
) -> None:
    """Make the index say what the files say; what is bad or out of reach goes."""
    index_db.commit(census.changes)  # first: a file without a row is found again, and so harmless
    for key in bad:
        block_files.quarantine(key)
    block_files.remove(census.unreachable)


# -- the index itself ----------------------------------------------------------------------------


def open_index(index: Path) -> OpenIndex:
    """The index, or its copy, or a new one."""
    if _is_there(index):
        try:
            return open_readable(index)
        except IndexDamaged:
            put_away(index)
    _remove_sidecars(index)  # a log that outlived its index would be played into the next one
    if _is_there(beside(index, BACKUP)):
        try:
            _copy_backup(index)
            return replace(open_readable(index), replaced=True, restored=True)
        except IndexDamaged:
            _remove(index)
            _remove_sidecars(index)
    return OpenIndex(IndexDb(index), [], [], replaced=True)


def open_readable(index: Path) -> OpenIndex:
    """An index of which every row can be read."""
    index_db = IndexDb(index)
    try:
        return OpenIndex(index_db, index_db.raw_blocks(), index_db.entries())
    except BaseException:
        index_db.close()
        raise


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
        raise IndexDamaged("it is not a regular file")
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
