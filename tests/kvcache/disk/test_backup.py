"""A cache folder is copied while it changes, and the copy is a whole cache folder."""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path

import pytest

from rekindle.errors import RekindleError
from rekindle.kvcache.disk import backup
from rekindle.kvcache.disk.backup import back_up

MODEL = "0" * 32


def make_cache(folder: Path) -> Path:
    """A folder with a model, whose index is a database of its own."""
    model = folder / MODEL
    (model / "blocks" / "ab").mkdir(parents=True)
    (model / "aside").mkdir()
    for path, content in (
        (folder / "secret", b"s" * 32),
        (model / "lock", b""),
        (model / "model", b"tiny.gguf"),
        (model / "blocks" / "ab" / "cd", b"a block"),
        (model / "aside" / "bad", b"a bad block"),
    ):
        path.write_bytes(content)
    with sqlite3.connect(model / "index.db") as db:
        db.execute("CREATE TABLE t (n INTEGER)")
    db.close()
    return folder


def rows(folder: Path) -> int:
    db = sqlite3.connect(folder / MODEL / "index.db")
    try:
        return int(db.execute("SELECT count(*) FROM t").fetchone()[0])
    finally:
        db.close()


def test_a_backup_has_all_files_but_quarantined_ones_and_only_its_owner_can_read_it(
    tmp_path: Path,
) -> None:
    report = back_up(make_cache(tmp_path / "kv"), tmp_path / "copy")
    copied = {
        path.relative_to(tmp_path / "copy").as_posix(): path.stat().st_mode & 0o777
        for path in (tmp_path / "copy").rglob("*")
        if path.is_file()
    }
    names = (
        "secret",
        "lock",
        *(f"{MODEL}/{n}" for n in ("index.db", "lock", "model", "blocks/ab/cd")),
    )
    assert copied == dict.fromkeys(names, 0o600)
    assert (tmp_path / "copy" / MODEL).stat().st_mode & 0o777 == 0o700
    assert (report.folders, report.files, report.torn) == (1, 4, ())


def test_the_index_is_copied_between_two_changes(tmp_path: Path) -> None:
    """A writer commits all the time. Every copy is consistent."""
    cache, stop = make_cache(tmp_path / "kv"), threading.Event()

    def write() -> None:
        db = sqlite3.connect(cache / MODEL / "index.db", isolation_level=None)
        db.executescript("PRAGMA journal_mode = WAL; PRAGMA wal_autocheckpoint = 4")
        while not stop.wait(0.1):
            db.executemany("INSERT INTO t VALUES (?)", [(n,) for n in range(50)])
        db.close()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for number in range(3):
            report = back_up(cache, tmp_path / f"copy{number}")
            assert report.torn == ()
            rows(tmp_path / f"copy{number}")
    finally:
        stop.set()
        writer.join()


def test_an_index_that_never_rests_is_replaced_by_the_servers_own_backup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = make_cache(tmp_path / "kv")
    (cache / MODEL / "index.db.bak").write_bytes((cache / MODEL / "index.db").read_bytes())
    states = iter(range(10_000))
    monkeypatch.setattr(backup, "_state", lambda _folder, _files: {"x": (0, next(states))})
    report = back_up(cache, tmp_path / "copy", sleep=lambda _s: None)
    assert report.torn == (MODEL,)
    assert rows(tmp_path / "copy") == 0


def test_a_file_that_disappears_meanwhile_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = make_cache(tmp_path / "kv")
    gone = cache / MODEL / "blocks" / "ab" / "evicted"
    found = list(backup._others(cache / MODEL))
    monkeypatch.setattr(backup, "_others", lambda _folder: iter([*found, gone]))
    back_up(cache, tmp_path / "copy")
    assert not (tmp_path / "copy" / MODEL / "blocks" / "ab" / "evicted").exists()


@pytest.mark.parametrize(
    ("place", "said"),
    [("full", "is not empty"), ("kv/inside", "is inside of the cache folder")],
)
def test_a_target_that_would_mix_two_caches_is_refused(
    place: str, said: str, tmp_path: Path
) -> None:
    make_cache(tmp_path / "kv")
    make_cache(tmp_path / "full")
    with pytest.raises(RekindleError, match=said):
        back_up(tmp_path / "kv", tmp_path / place)


def test_a_folder_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RekindleError, match="there is no cache folder"):
        back_up(tmp_path / "nowhere", tmp_path / "copy")
