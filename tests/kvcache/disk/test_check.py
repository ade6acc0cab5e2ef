from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from msgspec import structs

from rekindle.kvcache.disk.check import Finding, FolderReport, check
from rekindle.kvcache.disk.entry_table import DropBlock
from rekindle.kvcache.disk.folder import Folder, open_folder
from tests.kvcache.records import chain, entry, flip, key_of, row_of, size_of

RECORDS = chain(5)
ENTRY = entry("a", names=(("session_id", "x"),))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A cache with one intact model folder."""
    home = tmp_path / "cache"
    folder = reopen(home)
    folder.block_files.write(RECORDS)
    folder.index_db.commit([row_of(record) for record in RECORDS])
    folder.index_db.commit([ENTRY])
    folder.index_db.backup()
    folder.close()
    return home


def reopen(home: Path, identity: bytes = b"model") -> Folder:
    return open_folder(home, identity, limit_bytes=1 << 30)


def model(home: Path) -> Path:
    return next(path for path in home.iterdir() if path.is_dir())


def block(home: Path, number: int) -> Path:
    return model(home) / "blocks" / key_of(RECORDS[number]).hex()


def kinds(reports: list[FolderReport]) -> list[str]:
    return sorted(finding.kind for report in reports for finding in report.findings)


def tree(home: Path) -> dict[str, bytes]:
    """All files except those that opening an index changes."""
    files = [path for path in home.rglob("*") if path.is_file() and not path.is_symlink()]
    return {str(path): path.read_bytes() for path in files if "index.db" not in path.name}


def test_a_sound_cache_has_no_findings_and_every_block_was_read(home: Path) -> None:
    before = tree(home)
    assert check(home, repair=False) == [FolderReport(model(home), blocks=5, unreached=5)]
    assert check(home, repair=True) == [FolderReport(model(home), blocks=5, unreached=5)]
    assert tree(home) == before


def test_blocks_that_no_entry_uses_are_counted(home: Path) -> None:
    """They are not damage: the next server makes entries for them."""
    folder = reopen(home)
    packed = b"".join(record.tokens.packed for record in RECORDS[:3])
    namespace = RECORDS[0].namespace
    folder.index_db.commit([structs.replace(ENTRY, namespace=namespace, packed=packed)])
    folder.close()
    [report] = check(home, repair=False)
    assert (report.blocks, report.unreached, report.findings) == (5, 2, ())


def test_checking_creates_no_cache(tmp_path: Path) -> None:
    assert check(tmp_path / "nothing", repair=True) == []
    assert not (tmp_path / "nothing").exists()


def test_progress_counts_the_files_of_all_models(home: Path) -> None:
    other = reopen(home, b"other")
    other.block_files.write(chain(2, seed=1))
    other.close()
    reported: list[tuple[int, int]] = []
    check(home, repair=False, progress=lambda done, total: reported.append((done, total)))
    assert reported == [(done, 7) for done in range(1, 8)]


def test_a_folder_in_use_is_not_checked(home: Path) -> None:
    bad = block(home, 0)
    flip(bad, 100)
    idle = reopen(home, b"other")
    idle.close()
    folder = reopen(home)
    reports = {report.path: report for report in check(home, repair=True)}
    assert reports == {
        folder.path: FolderReport(folder.path, in_use=True),
        idle.path: FolderReport(idle.path),
    }
    assert bad.exists()
    folder.close()


# -- damage, found and mended --------------------------------------------------------------------


def _flip_state(home: Path) -> None:
    flip(block(home, 4), size_of(RECORDS[4]) - 60)


def _flip_above(home: Path) -> None:
    flip(block(home, 1), 150)


def _truncate(home: Path) -> None:
    block(home, 4).write_bytes(block(home, 4).read_bytes()[:-1])


def _delete(home: Path) -> None:
    block(home, 4).unlink()


def _forget(home: Path) -> None:
    folder = reopen(home)
    folder.index_db.commit([DropBlock(key_of(RECORDS[4]))])
    folder.close()


def _contradict(home: Path) -> None:
    folder = reopen(home)
    folder.index_db.commit([row_of(RECORDS[4])._replace(kind=1)])
    folder.close()


def _orphan(home: Path) -> None:
    folder = reopen(home)
    folder.block_files.write(chain(3, seed=3)[2:])
    folder.close()


def _dangle(home: Path) -> None:
    with closing(sqlite3.connect(model(home) / "index.db", isolation_level=None)) as db:
        db.execute("INSERT INTO names VALUES (?, 'session_id', ?, 'gone')", (b"r" * 32, b"lost"))


def _intrude(home: Path) -> None:
    (model(home) / "blocks" / "notes.txt").touch()
    (model(home) / "blocks" / ("ab" * 32)).symlink_to("/")


def _interrupt(home: Path) -> None:
    (model(home) / "blocks" / f".{'ab' * 32}.tmp").touch()


def _ruin_index(home: Path) -> None:
    (model(home) / "index.db").write_bytes(b"garbage")


def _lose_index(home: Path) -> None:
    (model(home) / "index.db").unlink()


DAMAGE: list[tuple[Callable[[Path], None], list[str]]] = [
    (_flip_state, ["bad_file"]),
    (_flip_above, ["bad_file", "lost_row", "lost_row", "lost_row"]),
    (_truncate, ["bad_file"]),
    (_delete, ["lost_row"]),
    (_forget, ["unknown_file"]),
    (_contradict, ["unknown_file"]),
    (_orphan, ["unreachable_file"]),
    (_dangle, ["dangling_name"]),
    (_intrude, ["foreign_file", "foreign_file"]),
    (_interrupt, ["unfinished_write"]),
    (_ruin_index, ["index_damaged"]),
    (_lose_index, ["index_damaged"]),
]


@pytest.mark.parametrize(("damage", "expected"), DAMAGE)
def test_damage_is_found_until_it_is_repaired(
    home: Path, damage: Callable[[Path], None], expected: list[str]
) -> None:
    damage(home)
    before = tree(home)
    assert kinds(check(home, repair=False)) == expected
    assert tree(home) == before, "a check without repair changes nothing"
    assert kinds(check(home, repair=True)) == expected
    assert kinds(check(home, repair=False)) == []
    folder = reopen(home)
    assert folder.index_db.entries() == [ENTRY]
    for row in folder.index_db.blocks():
        assert folder.block_files.read(row.key, row.size_bytes) in RECORDS
    assert len(folder.index_db.blocks()) >= (1 if damage is _flip_above else 4)
    folder.close()


def test_damage_that_only_a_full_read_can_find_is_quarantined(home: Path) -> None:
    """Opening trusts sizes and headers, but a check reads every byte."""
    _flip_state(home)
    folder = reopen(home)
    assert folder.recovery.quarantined == 0
    folder.close()
    check(home, repair=True)
    assert len(list((model(home) / "aside").iterdir())) == 1
    assert not block(home, 4).exists()


def test_a_damaged_table_that_opens_is_found(home: Path) -> None:
    """SQLite's quick check does not detect a missing row in one of its own indexes."""
    path = model(home) / "index.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("PRAGMA writable_schema = ON")
        db.execute("UPDATE sqlite_master SET sql = replace(sql, '(entry)', '(kind)')")
    assert kinds(check(home, repair=False)) == ["index_damaged"]
    check(home, repair=True)
    assert kinds(check(home, repair=False)) == []


def test_a_finding_of_an_older_index_says_what_a_repair_loses(home: Path) -> None:
    path = model(home) / "index.db"
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE meta SET value = '4' WHERE key = 'schema'")
    (report,) = check(home, repair=False)
    [finding] = report.findings
    assert finding.kind == "index_damaged"
    assert "schema version 4" in finding.sentence
    assert "index.db.damaged" in finding.sentence
    assert "names and pins are lost" in finding.sentence


def test_a_finding_names_its_block(home: Path) -> None:
    _delete(home)
    (report,) = check(home, repair=False)
    key = key_of(RECORDS[4]).hex()
    sentence = "The index has a block but its file is missing."
    assert report.findings == (Finding("lost_row", key, sentence),)


def test_several_kinds_of_damage_are_repaired_together(home: Path) -> None:
    chance = random.Random(4)
    for _ in range(15):
        for damage, _ in chance.sample(DAMAGE[:-2], 4):
            if block(home, 4).is_file():  # another kind may have taken it away
                damage(home)
        check(home, repair=True)
        assert kinds(check(home, repair=False)) == []
        folder = reopen(home)
        folder.block_files.write(RECORDS)
        folder.index_db.commit([row_of(record) for record in RECORDS])
        folder.close()
