from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Iterator, Sequence
from contextlib import chdir
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.errors import CorruptBlock
from rekindle.kvcache.disk import files as module
from rekindle.kvcache.disk.files import SYSTEM, Files, _transfer
from tests.kvcache.faults import ERRORS, KINDS, Faults, PulledPlug, each_failure

AS_ROOT = os.geteuid() == 0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "folder"


@pytest.fixture
def files(path: Path) -> Iterator[Files]:
    made = Files(path)
    yield made
    made.close()


def content(files: Files, name: str) -> bytes:
    _, size = files.read_start(name, 0)
    read = bytearray(size)
    files.read_into(name, [read], size)
    return bytes(read)


def test_a_file_is_read_back_into_separate_buffers(files: Files) -> None:
    files.write("a", [b"12", bytearray(b"345"), b"", memoryview(b"6")])
    one, other = bytearray(4), bytearray(2)
    files.read_into("a", [one, other], 6)
    assert (bytes(one), bytes(other)) == (b"1234", b"56")
    assert files.read_start("a", 3) == (b"123", 6)
    assert files.read_start("a", 100) == (b"123456", 6)


def test_only_the_owner_can_read_it(files: Files, path: Path) -> None:
    files.write("a", [b"x"])
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert stat.S_IMODE((path / "a").stat().st_mode) == 0o600


def test_a_folder_open_to_others_is_closed_to_them(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    Files(tmp_path / "open").close()
    assert stat.S_IMODE((tmp_path / "open").stat().st_mode) == 0o700


def test_a_folder_behind_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match=r".") as refused:
        Files(tmp_path / "link")
    assert refused.value.errno in (errno.ELOOP, errno.ENOTDIR)


# -- order and failure ---------------------------------------------------------------------------


def test_data_is_synced_before_the_rename_and_names_after_it(path: Path) -> None:
    faults = Faults()
    files = Files(path, faults.calls())
    files.write_all([("a", [b"1"]), ("b", [b"2"])])
    files.close()
    write = ["open", "writev", "fsync"]
    assert faults.kinds == [*write, *write, "replace", "replace", "fsync"]
    assert [what for kind, what in faults.log if kind == "replace"] == [".a.tmp", ".b.tmp"]


OLD, NEW = {"a": b"old a", "b": b"old b"}, {"a": b"new a", "b": b"new b", "c": b"new c"}


def write_new(path: Path, faults: Faults) -> BaseException | None:
    files = Files(path, faults.calls())
    try:
        files.write_all([(name, [value[:2], value[2:]]) for name, value in NEW.items()])
    except (OSError, PulledPlug) as error:
        return error
    finally:
        files.close()
    return None


def assert_each_is_whole(path: Path) -> None:
    files = Files(path)
    files.sweep()
    for name in files.sizes():
        assert content(files, name) in (OLD.get(name), NEW[name])
    assert OLD.keys() <= files.sizes().keys() <= NEW.keys()
    assert files.names() == sorted(files.sizes())
    files.close()


@pytest.mark.parametrize("error", [*ERRORS, PulledPlug], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_failed_write_tears_nothing_and_keeps_the_old_content(
    kind: str, error: int | type[BaseException], tmp_path: Path
) -> None:
    for turn, faults in enumerate(each_failure(kind, error)):
        path = tmp_path / str(turn)
        files = Files(path)
        files.write_all([(name, [value]) for name, value in OLD.items()])
        files.close()
        raised = write_new(path, faults)
        assert (raised is not None) == faults.fired, "a failure is raised, never swallowed"
        left = [each.name for each in path.iterdir() if each.name.endswith(".tmp")]
        assert left == [], "a failed write cleans up after itself"
        assert_each_is_whole(path)


def test_a_failed_sync_is_never_repeated(path: Path) -> None:
    faults = Faults("fsync", 1, errno.EIO)
    assert write_new(path, faults) is not None
    assert faults.kinds.count("fsync") == 1
    assert "replace" not in faults.kinds


def test_a_temporary_file_that_cannot_be_removed_is_swept_later(path: Path) -> None:
    class Stuck(Faults):
        def _wrap(self, kind: str, call: Any) -> Any:
            if kind not in ("fsync", "unlink"):
                return call

            def fail(*args: Any, **options: Any) -> None:
                raise OSError(errno.EIO, "stuck")

            return fail

    assert write_new(path, Stuck()) is not None
    assert [each.name for each in path.iterdir()] == [".a.tmp"]
    files = Files(path)
    files.write("a", [b"after all"])  # over the one that was left
    assert content(files, "a") == b"after all"
    files.close()
    assert write_new(path, Stuck()) is not None
    files = Files(path)
    files.sweep()
    assert files.names() == ["a"]
    files.close()


# -- short transfers -----------------------------------------------------------------------------


@given(
    st.lists(st.binary(max_size=20), max_size=40),
    st.lists(st.integers(1, 30), min_size=1, max_size=20),
)
def test_short_writes_are_continued(parts: list[bytes], steps: list[int]) -> None:
    written = bytearray()

    def writev(views: Sequence[memoryview], moved_bytes: int) -> int:
        assert 1 <= len(views) <= 16
        assert moved_bytes == len(written)
        steps.append(steps.pop(0))
        taken = b"".join(views)[: steps[-1]]
        written.extend(taken)
        return len(taken)

    assert _transfer(writev, parts) == len(written)
    assert written == b"".join(parts)


def test_a_large_write_is_split_into_calls(monkeypatch: pytest.MonkeyPatch, files: Files) -> None:
    monkeypatch.setattr(module, "_CALL_BYTES", 7)
    parts = [bytes([value]) * 5 for value in range(50)]
    files.write("a", parts)
    assert content(files, "a") == b"".join(parts)


def test_a_write_that_makes_no_progress_is_an_error(path: Path) -> None:
    files = Files(path, replace(SYSTEM, writev=lambda handle, views: 0))
    with pytest.raises(OSError, match="error"):
        files.write("a", [b"x"])
    assert files.names() == []
    files.close()


def test_a_file_that_shrinks_during_a_read_is_detected(path: Path) -> None:
    files = Files(path, replace(SYSTEM, preadv=lambda handle, views, start: 0))
    files.write("a", [b"xyz"])
    with pytest.raises(CorruptBlock, match="truncated"):
        files.read_into("a", [bytearray(3)], 3)
    with pytest.raises(CorruptBlock, match="truncated"):
        files.read_start("a", 3)
    files.close()


# -- what is not a file of ours ------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 2, 4])
def test_a_file_of_another_size_is_refused(files: Files, size: int) -> None:
    files.write("a", [b"xyz"])
    with pytest.raises(CorruptBlock, match="3 bytes instead of"):
        files.read_into("a", [bytearray(size)], size)


def test_folders_pipes_links_and_sockets_are_never_read(files: Files, path: Path) -> None:
    files.write("real", [b"xyz"])
    (path / "folder").mkdir()
    os.mkfifo(path / "pipe")
    (path / "link").symlink_to(path / "real")
    with socket.socket(socket.AF_UNIX) as listener, chdir(path):  # the whole path may be too long
        listener.bind("socket")
        for name in ("folder", "pipe"):
            with pytest.raises(CorruptBlock, match="not a regular file"):
                files.read_start(name, 3)
        for name in ("link", "socket"):
            with pytest.raises(OSError, match=r"."):
                files.read_start(name, 3)
    assert files.sizes() == {"real": 3}
    assert files.names() == ["folder", "link", "pipe", "real", "socket"]


@pytest.mark.skipif(AS_ROOT, reason="root reads everything")
def test_an_unreadable_file_is_an_error(files: Files, path: Path) -> None:
    files.write("a", [b"xyz"])
    (path / "a").chmod(0)
    with pytest.raises(PermissionError):
        files.read_start("a", 1)


PATHS = ["", ".", "..", "a/b", "/etc/passwd", "../a", "a\0b", "./a", "a/"]


@pytest.mark.parametrize("name", PATHS)
def test_a_path_is_not_a_name(files: Files, name: str) -> None:
    for act in (
        lambda: files.write(name, [b"x"]),
        lambda: files.read_start(name, 1),
        lambda: files.unlink(name),
        lambda: files.discard(name),
        lambda: files.move(name, files, "a"),
        lambda: files.move("a", files, name),
    ):
        with pytest.raises(ValueError, match="not a path"):
            act()


def test_a_link_is_replaced_and_not_written_through(files: Files, path: Path) -> None:
    (path.parent / "victim").write_bytes(b"precious")
    (path / "a").symlink_to(path.parent / "victim")
    (path / ".a.tmp").symlink_to(path.parent / "victim")
    files.write("a", [b"ours"])
    assert content(files, "a") == b"ours"
    assert (path.parent / "victim").read_bytes() == b"precious"


def test_removing_a_missing_file_is_not_an_error(files: Files) -> None:
    files.unlink("a")
    files.discard("a")


def test_discarding_removes_a_link_but_not_its_target(files: Files, path: Path) -> None:
    outside = path.parent / "outside"
    outside.mkdir()
    (outside / "precious").touch()
    (path / "link").symlink_to(outside)
    (path / "folder").mkdir()
    (path / "folder" / "inner").symlink_to(outside)
    files.discard("link")
    files.discard("folder")
    assert files.names() == []
    assert (outside / "precious").exists()


def test_a_file_moves_to_another_folder(files: Files, tmp_path: Path) -> None:
    other = Files(tmp_path / "other")
    files.write("a", [b"x"])
    files.move("a", other, "b")
    assert (files.sizes(), other.sizes()) == ({}, {"b": 1})
    other.close()


def test_the_free_space_is_reported(files: Files) -> None:
    assert files.free_bytes() > 0


def test_closing_twice_is_not_an_error(path: Path) -> None:
    files = Files(path)
    files.close()
    files.close()
