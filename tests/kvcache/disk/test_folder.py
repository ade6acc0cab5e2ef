from __future__ import annotations

import os
import random
import signal
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Protocol

import pytest

from rekindle.errors import ConfigError, FolderLocked
from rekindle.kvcache.disk.files import Files
from rekindle.kvcache.disk.folder import Folder, open_folder
from rekindle.kvcache.disk.secret import read_secret
from tests.kvcache.records import chain, entry, key_of, row_of, size_of

LIMIT = 1 << 30


class Opener(Protocol):
    def __call__(
        self, identity: bytes = ..., *, limit_bytes: int = ..., served: Sequence[str] = ...
    ) -> Folder: ...


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "new" / "cache"


@pytest.fixture
def open_one(home: Path) -> Iterator[Opener]:
    """Opens folders, and closes them after the test."""
    with ExitStack() as opened:

        def opener(
            identity: bytes = b"model", *, limit_bytes: int = LIMIT, served: Sequence[str] = ("",)
        ) -> Folder:
            folder = open_folder(home, identity, limit_bytes=limit_bytes, served=served)
            opened.callback(folder.close)
            return folder

        yield opener


def fill(folder: Folder, count: int = 3, *, seed: int = 0, blob_bytes: int = 100) -> None:
    records = chain(count, seed=seed, blob_bytes=blob_bytes)
    folder.block_files.write(records)
    folder.index_db.commit([row_of(record) for record in records])


# -- layout --------------------------------------------------------------------------------------


def test_a_new_folder_is_private_and_as_documented(home: Path, open_one: Opener) -> None:
    folder = open_one()
    fill(folder)
    folder.index_db.backup()
    assert folder.path.parent == home
    assert len(folder.path.name) == 32
    names = {path.name for path in folder.path.iterdir()}
    assert names == {"lock", "model", "index.db", "index.db-wal", "index.db.bak", "blocks", "aside"}
    for path in (home, *home.rglob("*")):
        wanted = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == wanted, path
    assert folder.recovery.rebuilt is False


def test_each_model_has_a_folder_of_its_own(open_one: Opener) -> None:
    assert open_one(b"one").path != open_one(b"other").path


def test_stored_blocks_survive_a_restart(open_one: Opener) -> None:
    folder = open_one()
    fill(folder)
    folder.index_db.commit([entry("a", names=(("session_id", "x"),))])
    folder.close()
    again = open_one()
    assert again.index_db.blocks() == [row_of(record) for record in chain(3)]
    assert again.index_db.entries() == [entry("a", names=(("session_id", "x"),))]
    for record in chain(3):
        assert again.block_files.read(key_of(record), size_of(record)) == record
    assert again.recovery == type(again.recovery)()


def test_the_cache_dir_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "large").mkdir()
    (tmp_path / "cache").symlink_to(tmp_path / "large")
    folder = open_folder(tmp_path / "cache", b"model", limit_bytes=LIMIT)
    assert folder.path.parent == tmp_path / "large"
    folder.close()


def test_a_planted_link_in_place_of_a_folder_is_refused(home: Path, open_one: Opener) -> None:
    folder = open_one()
    folder.close()
    outside = home.parent / "outside"
    folder.path.rename(outside)
    folder.path.symlink_to(outside)
    before = sorted(outside.rglob("*"))
    with pytest.raises(OSError, match=r"."):
        open_one()
    assert sorted(outside.rglob("*")) == before


def test_two_models_of_one_server_with_equal_state_have_a_folder_each(open_one: Opener) -> None:
    first, second = ("first", "second"), ("second", "first")
    opened = open_one(served=first), open_one(served=second)
    paths = [folder.path for folder in opened]
    assert paths[0] != paths[1]
    for folder, records in zip(opened, (2, 3), strict=True):
        fill(folder, records)
        folder.close()
    again = open_one(served=second), open_one(served=first)  # in the other order
    assert [folder.path for folder in again] == paths[::-1]
    assert [len(folder.index_db.blocks()) for folder in again] == [3, 2]


def test_a_model_that_was_moved_keeps_its_folder(open_one: Opener) -> None:
    folder = open_one(served=("old", "other"))
    folder.close()
    assert open_one(served=("new", "other")).path == folder.path


def test_a_model_keeps_its_own_folder_without_the_other_one(open_one: Opener) -> None:
    open_one(served=("first", "second"))
    own = open_one(served=("second", "first"))
    own.close()
    assert open_one(served=("second",)).path == own.path


# -- the secret ----------------------------------------------------------------------------------


def test_the_secret_is_created_once(home: Path) -> None:
    secret = read_secret(home)
    assert len(secret) == 32
    assert read_secret(home) == secret == (home / "secret").read_bytes()
    assert [path.name for path in home.iterdir()] == ["secret"]


def test_processes_that_start_together_agree_on_the_secret(home: Path) -> None:
    script = (
        "import sys\nfrom pathlib import Path\n"
        "from rekindle.kvcache.disk.secret import read_secret\n"
        "sys.stdin.read(); print(read_secret(Path(sys.argv[1])).hex())"
    )
    line = [sys.executable, "-c", script, str(home)]
    pipe = subprocess.PIPE
    started = [subprocess.Popen(line, stdin=pipe, stdout=pipe, text=True) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:  # all are let go at the same moment
        said = list(pool.map(lambda process: process.communicate("")[0], started))
    assert len(set(said)) == 1
    assert said[0].strip() == read_secret(home).hex()


def test_the_second_process_uses_the_secret_of_the_first(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = Path.hardlink_to

    def too_late(path: Path, target: Path) -> None:
        path.write_bytes(b"f" * 32)
        link(path, target)

    monkeypatch.setattr(Path, "hardlink_to", too_late)
    assert read_secret(home) == b"f" * 32
    assert [path.name for path in home.iterdir()] == ["secret"]


@pytest.mark.parametrize("secret", [b"", b"short", b"x" * 33])
def test_a_secret_of_another_length_is_refused_with_a_remedy(home: Path, secret: bytes) -> None:
    home.mkdir(parents=True)
    (home / "secret").write_bytes(secret)
    with pytest.raises(ConfigError, match="must hold 32 bytes"):
        read_secret(home)
    assert (home / "secret").read_bytes() == secret


def test_a_secret_behind_a_link_is_refused(home: Path) -> None:
    home.mkdir(parents=True)
    (home.parent / "other").write_bytes(b"x" * 32)
    (home / "secret").symlink_to(home.parent / "other")
    with pytest.raises(OSError, match=r"."):
        read_secret(home)


# -- one process ---------------------------------------------------------------------------------

HOLD = """
import sys
from pathlib import Path
from rekindle.kvcache.disk.folder import open_folder
folder = open_folder(Path(sys.argv[1]), b"model", limit_bytes=1 << 30)
print("open", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(home: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has locked the model's folder."""
    line = [sys.executable, "-c", HOLD, str(home)]
    with subprocess.Popen(
        line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        yield process
        process.kill()


def test_a_folder_in_use_is_refused_with_a_remedy(
    holder: subprocess.Popen[str], open_one: Opener
) -> None:
    with pytest.raises(FolderLocked, match="--cache-dir"):
        open_one()
    open_one(b"another model").close()
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert open_one().recovery.rebuilt is False  # a killed process holds nothing


OPEN_AND_CLOSE = """
import sys
from pathlib import Path
from rekindle.kvcache.disk.folder import open_folder
for _ in range(30):
    open_folder(Path(sys.argv[1]), sys.argv[2].encode(), limit_bytes=1 << 30).close()
"""


def test_checking_whether_a_model_is_idle_never_blocks_its_start(home: Path) -> None:
    started = [
        subprocess.Popen([sys.executable, "-c", OPEN_AND_CLOSE, str(home), str(model)])
        for model in range(3)
    ]
    assert [process.wait() for process in started] == [0, 0, 0]


def test_a_folder_is_free_again_after_closing_or_failing(
    open_one: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_one().close()
    with monkeypatch.context() as patched:

        def fail(files: Files) -> None:
            raise OSError("on purpose")

        patched.setattr(Files, "scan", fail)
        with pytest.raises(OSError, match="on purpose"):
            open_one()
    open_one()
    with pytest.raises(FolderLocked):
        open_one()


def test_opening_and_closing_leaves_no_handle_behind(open_one: Opener) -> None:
    handles = Path("/dev/fd")
    open_one().close()
    before = len(list(handles.iterdir()))
    for _ in range(5):
        open_one().close()
    assert len(list(handles.iterdir())) == before


WRITE_UNTIL_KILLED = """
import sys
from pathlib import Path
from rekindle.kvcache.disk.folder import open_folder
from tests.kvcache.records import chain, row_of
folder = open_folder(Path(sys.argv[1]), b"model", limit_bytes=1 << 30)
for seed in range(10_000):
    records = chain(3, seed=seed, blob_bytes=50_000)
    folder.block_files.write(records)
    folder.index_db.commit([row_of(record) for record in records])
    print(seed, flush=True)
"""


def test_acknowledged_blocks_survive_a_kill(home: Path, open_one: Opener) -> None:
    chance = random.Random(7)
    for _ in range(4):
        line = [sys.executable, "-c", WRITE_UNTIL_KILLED, str(home)]
        with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for _ in range(chance.randrange(1, 12)):
                last = int(process.stdout.readline())
            process.kill()
        folder = open_one()
        assert not folder.recovery.rebuilt
        assert folder.block_files.foreign() == folder.block_files.unfinished() == []
        rows = {row.key: row for row in folder.index_db.blocks()}
        assert {key: row.size_bytes for key, row in rows.items()} == folder.block_files.sizes()
        for seed in range(last + 1):
            for record in chain(3, seed=seed, blob_bytes=50_000):
                key = key_of(record)
                assert folder.block_files.read(key, rows[key].size_bytes) == record
        folder.close()


# -- several models under one budget -------------------------------------------------------------


def make_idle(open_one: Opener, name: bytes, blob_bytes: int, used_s: int, *, pin: bool) -> Path:
    folder = open_one(name)
    fill(folder, 1, blob_bytes=blob_bytes)
    if pin:
        folder.index_db.commit([entry("a", pinned=True)])
    folder.close()
    os.utime(folder.path / "lock", (used_s, used_s))
    return folder.path


def used_bytes(path: Path) -> int:
    return sum(each.stat().st_size for each in path.rglob("*") if each.is_file())


def test_the_budget_is_shared_with_idle_models_and_among_the_others(open_one: Opener) -> None:
    idle = make_idle(open_one, b"idle", 100_000, 1, pin=False)
    folder = open_one(limit_bytes=1_000_000, served=("a", "b", "c"))
    assert idle.exists()
    assert folder.limit_bytes == (1_000_000 - used_bytes(idle)) // 3


def test_a_model_that_this_server_opens_next_is_not_idle(open_one: Opener) -> None:
    served = ("a", "b")
    second = open_one(b"b", served=("b", "a"))
    fill(second, blob_bytes=300_000)
    second.close()
    first = open_one(b"a", limit_bytes=1_000_000, served=served)
    assert first.limit_bytes == 500_000
    assert second.path.exists()


@pytest.mark.parametrize(("one", "other"), [(b"x", b"y"), (b"y", b"x")])
def test_idle_models_are_removed_oldest_first_and_pinned_ones_stay(
    open_one: Opener, one: bytes, other: bytes
) -> None:
    pinned = make_idle(open_one, b"pinned", 300_000, 1, pin=True)
    oldest = make_idle(open_one, one, 300_000, 2, pin=False)
    newest = make_idle(open_one, other, 100_000, 3, pin=False)
    folder = open_one(limit_bytes=1_000_000)
    assert (pinned.exists(), oldest.exists(), newest.exists()) == (True, False, True)
    assert folder.limit_bytes == 1_000_000 - used_bytes(pinned) - used_bytes(newest)


def test_superseded_state_of_a_model_is_trimmed(open_one: Opener) -> None:
    """A model with another engine, KV type or secret has another folder of the same name."""
    served = ("a", "b")
    old, older = (open_one(name, served=served) for name in (b"old", b"older"))
    for folder, blob_bytes in ((old, 100_000), (older, 200_000)):
        fill(folder, 1, blob_bytes=blob_bytes)
        folder.close()
    os.utime(older.path / "lock", (1, 1))
    new = open_one(b"new", limit_bytes=1_000_000, served=served)
    assert (old.path.exists(), older.path.exists()) == (True, False)
    assert new.superseded_bytes == used_bytes(old.path)
    assert new.limit_bytes == 500_000 - used_bytes(old.path)


def test_superseded_state_does_not_reduce_the_share_of_other_models(
    open_one: Opener,
) -> None:
    old = open_one(b"old", served=("a", "b"))
    fill(old, 1, blob_bytes=100_000)
    old.close()
    assert open_one(b"b", limit_bytes=1_000_000, served=("b", "a")).limit_bytes == 500_000
    assert old.path.exists()


def test_a_model_counts_as_used_from_opening_to_closing(open_one: Opener) -> None:
    lock = make_idle(open_one, b"model", 1, 1, pin=False) / "lock"
    folder = open_one()
    assert lock.stat().st_mtime > 1
    os.utime(lock, (1, 1))
    folder.close()
    assert lock.stat().st_mtime > 1


def test_a_model_whose_pins_cannot_be_read_stays(open_one: Opener) -> None:
    damaged = make_idle(open_one, b"damaged", 700_000, 1, pin=False)
    (damaged / "index.db").write_bytes(b"garbage")
    assert open_one(limit_bytes=1_000_000).limit_bytes < 300_000
    assert damaged.exists()


def test_a_model_whose_index_is_outdated_stays_because_it_may_have_pins(open_one: Opener) -> None:
    outdated = make_idle(open_one, b"outdated", 700_000, 1, pin=True)
    with closing(sqlite3.connect(outdated / "index.db")) as db, db:
        db.execute("UPDATE meta SET value = '4' WHERE key = 'schema'")
    assert open_one(limit_bytes=1_000_000).limit_bytes < 300_000
    assert outdated.exists()


def test_pins_beyond_the_budget_leave_a_limit_of_zero(open_one: Opener) -> None:
    make_idle(open_one, b"pinned", 300_000, 1, pin=True)
    assert open_one(limit_bytes=100_000).limit_bytes == 0


def test_a_model_in_use_is_neither_counted_nor_removed(open_one: Opener) -> None:
    busy = open_one(b"busy")
    fill(busy, blob_bytes=300_000)
    assert open_one(limit_bytes=100_000, served=("a", "b")).limit_bytes == 50_000
    assert len(busy.block_files.sizes()) == 3


def test_only_model_folders_of_this_cache_are_removed(home: Path, open_one: Opener) -> None:
    make_idle(open_one, b"idle", 1_000, 1, pin=False)
    outside = home.parent / "outside"
    for other in (outside, home / "notes", home / ("a" * 32), home / ("b" * 31), home / "c.d"):
        other.mkdir()
        (other / "precious").write_bytes(bytes(100_000))
    (outside / "lock").touch()
    (home / "notes" / "lock").touch()
    (home / ("b" * 31) / "lock").touch()
    (home / ("d" * 32)).symlink_to(outside)
    (home / ("e" * 32)).write_bytes(bytes(100_000))
    folder = open_one(limit_bytes=1_000)
    assert folder.limit_bytes == 1_000
    assert len(list(home.rglob("precious"))) == 4
    assert (outside / "precious").exists()
    assert (home / ("e" * 32)).exists()


def test_links_inside_an_idle_model_are_removed_but_not_followed(
    home: Path, open_one: Opener
) -> None:
    idle = make_idle(open_one, b"idle", 700_000, 1, pin=False)
    outside = home.parent / "outside"
    outside.mkdir()
    (outside / "precious").touch()
    (idle / "blocks" / "link").symlink_to(outside)
    (idle / "link").symlink_to(outside)
    assert open_one(limit_bytes=1_000_000).limit_bytes == 1_000_000
    assert not idle.exists()
    assert (outside / "precious").exists()
