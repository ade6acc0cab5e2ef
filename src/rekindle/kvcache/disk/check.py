"""Verifies every block of a cache folder against its index, for `rekindle cache check`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Literal

from rekindle.errors import CorruptBlock, FolderLocked, IndexDamaged, IndexOutdated
from rekindle.kvcache.block import BlockKind, PrefixHandle
from rekindle.kvcache.disk.block_files import BlockFiles
from rekindle.kvcache.disk.entry_table import BlockRow, EntryRow
from rekindle.kvcache.disk.folder import (
    INDEX,
    claim,
    gate,
    model_folders,
    open_block_files,
    secret_of,
)
from rekindle.kvcache.disk.index_db import IndexDb, beside
from rekindle.kvcache.disk.recovery import (
    DAMAGED,
    Census,
    compare,
    open_index,
    open_readable,
    reachable,
    repair_index,
    set_aside,
)
from rekindle.kvcache.tree import Tree
from rekindle.tokens import TOKEN_BYTES, Tokens

FindingKind = Literal[
    "index_damaged",
    "bad_file",
    "lost_row",
    "unknown_file",
    "unreachable_file",
    "dangling_name",
    "unfinished_write",
    "foreign_file",
]


@dataclass(frozen=True, slots=True)
class Finding:
    kind: FindingKind
    key: str  # of the block, in hex; empty for other findings
    sentence: str


@dataclass(frozen=True, slots=True)
class FolderReport:
    path: Path
    in_use: bool = False  # by another process, so it was not checked
    is_sealed: bool = False  # with an unknown secret, so it was not checked
    blocks: int = 0  # verified files
    unreached: int = 0  # blocks that no entry uses; the next server makes entries for them
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True, slots=True)
class _Survey:
    """The good and the bad files of a folder."""

    found: dict[bytes, BlockRow]
    bad: dict[bytes, str]


def check(
    cache_dir: Path,
    *,
    repair: bool,
    secret: bytes | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[FolderReport]:
    """Verify every model folder that is not in use. `secret` is the configured one.

    `progress` gets the number of files done and the total. Repaired problems are reported too.
    """
    if not cache_dir.is_dir():
        return []
    home = cache_dir.resolve()
    reports: dict[Path, FolderReport] = {}
    with ExitStack() as resources:
        opened: dict[Path, BlockFiles] = {}
        with gate(home):
            for path in model_folders(home):
                reports[path] = FolderReport(path, in_use=True)
                try:
                    resources.callback(os.close, claim(path))
                except FolderLocked:
                    continue
                own = secret_of(path, secret)
                if own is None:
                    reports[path] = FolderReport(path, is_sealed=True)
                else:
                    opened[path] = open_block_files(path, own, resources)
        total = sum(len(block_files.sizes()) for block_files in opened.values())
        done = count(1)

        def step() -> None:
            progress(next(done), total)

        for path, block_files in opened.items():
            reports[path] = _check_folder(path, block_files, step, repair=repair)
    return list(reports.values())


def _check_folder(
    path: Path, block_files: BlockFiles, step: Callable[[], None], *, repair: bool
) -> FolderReport:
    findings = list(_unexpected_files(block_files))
    if repair:
        block_files.sweep()
        block_files.quarantine_foreign()
    survey = _read_all(block_files, step)
    findings += [
        Finding("bad_file", key.hex(), f"A block's file is bad: {why}.")
        for key, why in survey.bad.items()
    ]
    index_db, damage = _open(path / INDEX, repair=repair)
    findings += damage
    unreached = 0
    if index_db is not None:
        try:
            findings += _check_index(block_files, index_db, survey, repair=repair)
            unreached = _count_unreached(survey.found, index_db.entries())
        finally:
            index_db.close()
    return FolderReport(
        path, blocks=len(survey.found), unreached=unreached, findings=tuple(findings)
    )


def _count_unreached(found: Mapping[bytes, BlockRow], entries: Iterable[EntryRow]) -> int:
    """Count the blocks that no entry uses, by the rules of the running server."""
    sizes = (len(row.packed) // TOKEN_BYTES for row in found.values())
    tree = Tree(max(sizes, default=1))  # full blocks are the longest
    kind = BlockKind(0, exact=False)
    for row in reachable(found):
        tokens = Tokens(row.packed)
        resumable = bool(row.kind & 2)
        tree.add(
            row.namespace,
            tree.get(row.parent),
            tokens,
            kind._replace(resumable=resumable),
            key=row.key,
        )
    for entry in entries:
        if entry.packed:
            tree.place(PrefixHandle(entry.kv_namespace or entry.namespace, Tokens(entry.packed)))
    return sum(not tree.is_reached(block) for block in tree)


def _unexpected_files(block_files: BlockFiles) -> Iterator[Finding]:
    for name in block_files.unfinished():
        yield Finding("unfinished_write", "", f"A write was not finished: {name!a}.")
    for name in block_files.foreign():
        yield Finding("foreign_file", "", f"This is not a block's file: {name!a}.")


def _read_all(block_files: BlockFiles, step: Callable[[], None]) -> _Survey:
    survey = _Survey({}, {})
    for key, size_bytes in sorted(block_files.sizes().items()):
        try:
            record = block_files.read(key, size_bytes)
        except CorruptBlock as error:
            survey.bad[key] = str(error)
        else:
            survey.found[key] = BlockRow.of(key, record, record.tokens, size_bytes)
        step()
    return survey


def _open(index: Path, *, repair: bool) -> tuple[IndexDb | None, list[Finding]]:
    """Open the index. Returns None if it is damaged and not repaired."""
    try:
        return _open_sound(index), []
    except IndexDamaged as error:
        sentence = f"The index cannot be used: {error}."
        if isinstance(error, IndexOutdated):
            aside = beside(index, DAMAGED).name
            sentence += f" A repair moves it to {aside}, and its names and pins are lost."
        finding = Finding("index_damaged", "", sentence)
    if not repair:
        return None, [finding]
    if index.is_symlink() or index.exists():
        set_aside(index)
    return open_index(index).index_db, [finding]


def _open_sound(index: Path) -> IndexDb:
    if not index.exists():
        raise IndexDamaged("it is missing")
    index_db = open_readable(index).index_db
    try:
        if problems := index_db.problems():
            raise IndexDamaged(problems[0])
    except BaseException:
        index_db.close()
        raise
    return index_db


def _check_index(
    block_files: BlockFiles, index_db: IndexDb, survey: _Survey, *, repair: bool
) -> Iterable[Finding]:
    rows = index_db.blocks()
    census = compare(rows, survey.found)
    findings = [
        *_disagreements(census, {row.key for row in rows}, survey),
        *[Finding("dangling_name", "", "A name belongs to no entry.")] * index_db.dangling_names(),
    ]
    if repair:
        index_db.drop_dangling_names()
        repair_index(block_files, index_db, census, survey.bad)
        index_db.backup()
    return findings


def _disagreements(census: Census, known: set[bytes], survey: _Survey) -> Iterator[Finding]:
    for key in census.lost:
        if key in survey.bad:
            continue  # reported already
        why = "its ancestors are gone" if key in survey.found else "its file is missing"
        yield Finding("lost_row", key.hex(), f"The index has a block but {why}.")
    for row in census.adopted:
        what = "is different in the index" if row.key in known else "is not in the index"
        yield Finding("unknown_file", row.key.hex(), f"A good block {what}.")
    for key in census.unreachable:
        if key not in known:
            yield Finding("unreachable_file", key.hex(), "A block's ancestors are gone.")
