"""A disk that is full, or fails, costs reuse and nothing else: requests go on, one warning is
given, and when the disk is well again it is written to again."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rekindle.runtime import wire
from tests.stress.office import Office, load
from tests.stress.trouble import Trouble
from tests.support.fake import FakeEngine

MB = 1 << 20
Mount = Callable[[int], Path]


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """Small file systems of so many bytes; needs the right to mount."""
    with contextlib.ExitStack() as stack:

        def mounted(size_bytes: int) -> Path:
            path = tmp_path / "disk"
            path.mkdir()
            command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(path)]
            if shutil.which("mount") is None or subprocess.run(command, stderr=-3).returncode:
                pytest.skip("file systems cannot be mounted here")
            stack.callback(subprocess.run, ["umount", "--lazy", str(path)], check=True)
            return path

        yield mounted


def free_bytes(path: Path) -> int:
    system = os.statvfs(path)
    return system.f_bavail * system.f_frsize


def fill(disk: Path, leave_bytes: int = 0) -> Path:
    """Somebody else's file that takes all the room there is."""
    path = disk / "somebody else's"
    with path.open("wb") as file, contextlib.suppress(OSError):
        while free_bytes(disk) > leave_bytes:
            file.write(bytes(min(1 << 16, free_bytes(disk) - leave_bytes)))
            file.flush()
    return path


def office_on(disk: Path, **more: int) -> Office:
    return Office(FakeEngine(), load(disk / "kv", **more))


def test_a_full_disk_is_one_warning_and_is_used_again_when_there_is_room(mount: Mount) -> None:
    disk = mount(3 * MB)
    office = office_on(disk)
    office.converse(1)
    office.flush()
    stored = office.stored_blocks
    assert stored and not office.warnings
    other = fill(disk)
    for seed in range(2, 12):
        office.converse(seed)
        office.flush()
    assert office.disk_state == "full"
    assert len(office.warnings) == 1
    assert "full" in office.warnings[0]
    other.unlink()
    office.memory.tick()
    for seed in range(12, 15):
        office.converse(seed)
    office.flush()
    assert office.disk_state == "ok"
    assert office.stored_blocks > stored
    assert len(office.warnings) == 1
    office.close()


def test_however_often_a_full_disk_is_tried_it_is_one_warning(mount: Mount) -> None:
    disk = mount(3 * MB)
    office = office_on(disk)
    first = office.converse(1)
    office.flush()
    fill(disk)
    for seed in range(2, 8):
        office.memory.tick()
        office.flush()
        office.ask([*first.turn.tokens, seed])
        office.converse(seed)
        office.flush()
    assert [note.level for note in office.notes] == ["warning"]
    office.close()


def test_a_disk_that_somebody_else_fills_takes_nothing_from_what_is_stored(mount: Mount) -> None:
    """What lies there was paid for; a restart on the full disk still reads it."""
    disk = mount(3 * MB)
    office = office_on(disk)
    reply = office.converse(1, turns=3)
    office.close()
    fill(disk)
    again = office_on(disk)
    assert again.ask([*reply.turn.tokens, 9]).finished.cache.tier == "disk"
    again.converse(2)
    again.close()


def test_a_disk_full_from_the_start_leaves_ram(mount: Mount) -> None:
    disk = mount(2 * MB)
    fill(disk)
    office = office_on(disk)
    assert office.disk is None
    assert office.disk_state == "failing"
    assert office.converse(1, turns=3).finished.cache.tier == "ram"
    assert len(office.warnings) == 1
    office.close()


def test_free_space_is_left_to_others_down_to_the_floor(mount: Mount) -> None:
    """The index may take a little of it: it is written whatever happens."""
    disk = mount(6 * MB)
    office = office_on(disk, disk_floor_bytes=3 * MB)
    for seed in range(150):
        office.converse(seed, turns=1)
        office.flush()
        assert free_bytes(disk) > 3 * MB - MB // 2
    assert office.disk_state == "full"
    assert len(office.warnings) == 1
    assert office.stored_blocks > 10
    office.close()


def test_a_read_only_disk_leaves_ram(mount: Mount) -> None:
    disk = mount(4 * MB)
    office_on(disk).close()
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    office = office_on(disk)
    assert office.disk is None
    assert len(office.warnings) == 1
    assert office.converse(1, turns=3).finished.cache.tier == "ram"
    office.close()


# -- the same, and what no file system can be told to do, with calls that fail --------------------


@pytest.mark.parametrize(
    ("error", "state"),
    [(errno.ENOSPC, "full"), (errno.EDQUOT, "full"), (errno.EROFS, "failing"),
     (errno.EIO, "failing"), (errno.EACCES, "failing")],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["open", "writev", "fsync", "replace"])
def test_any_failing_call_is_one_warning_and_heals(
    tmp_path: Path, kind: str, error: int, state: str
) -> None:
    trouble = Trouble((kind,))
    office = Office(FakeEngine(), load(tmp_path / "kv"), trouble.calls())
    trouble.error = error
    for seed in range(5):
        office.converse(seed)
        office.flush()
    assert office.disk_state == state
    assert office.stored_blocks == 0
    assert len(office.warnings) == 1
    trouble.error = None
    office.memory.tick()
    office.flush()
    assert office.disk_state == "ok"
    assert office.stored_blocks
    assert [note.level for note in office.notes] == ["warning", "info"]
    office.close()


def test_after_a_failed_fsync_nothing_is_acknowledged_and_no_handle_is_tried_twice(
    tmp_path: Path,
) -> None:
    """The kernel may have dropped the pages: a second fsync of the handle would lie."""
    trouble = Trouble(("fsync",), error=errno.EIO)
    office = Office(FakeEngine(), load(tmp_path / "kv"), trouble.calls())
    reply = office.ask(range(100, 140), naming=wire.Naming(return_cache_key=True))
    office.flush()
    assert office.stored_blocks == 0
    key = reply.finished.cache.new_cache_key
    assert key is not None
    info = office.queries.answer(wire.ShowEntry(key), office.root(), admin=False)
    assert isinstance(info, wire.EntryInfo)
    assert info.stored_tokens == 0
    trouble.error = None
    office.memory.tick()
    office.flush()
    assert office.stored_blocks
    assert most_fsyncs_of_a_file(trouble.log) == 1
    office.close()
    again = Office(FakeEngine(), load(tmp_path / "kv"))
    assert again.ask([*range(100, 140), 7]).finished.cache.tier == "disk"
    again.close()


def most_fsyncs_of_a_file(log: list[tuple[str, object]]) -> int:
    """The most tries that the handle of one opened file has seen."""
    tries: dict[object, int] = {}
    most = 0
    for kind, handle in log:
        if kind == "open":
            tries[handle] = 0
        elif kind.startswith("fsync") and handle in tries:
            tries[handle] += 1
            most = max(most, tries[handle])
    return most


def test_a_folder_that_vanishes_is_one_warning(tmp_path: Path) -> None:
    office = Office(FakeEngine(), load(tmp_path / "kv"))
    first = office.converse(1)
    office.flush()
    shutil.rmtree(tmp_path / "kv")
    for seed in range(2, 6):
        office.memory.tick()
        office.converse(seed)
        office.flush()
    assert office.disk_state == "failing"
    assert len(office.warnings) == 1
    assert office.ask([*first.turn.tokens, 3]).reused
    office.close()


def test_what_a_vanished_folder_held_is_computed_again(tmp_path: Path) -> None:
    office = Office(FakeEngine(), load(tmp_path / "kv"))
    office.converse(1)
    office.close()
    again = Office(FakeEngine(), load(tmp_path / "kv"))
    shutil.rmtree(tmp_path / "kv")
    again.converse(1)
    again.close()


def test_a_disk_is_not_called_well_before_it_was_written_to(tmp_path: Path) -> None:
    """A read that works, or a minute gone by, proves nothing."""
    trouble = Trouble(("writev",))
    office = Office(FakeEngine(), load(tmp_path / "kv", ram_bytes=12_000), trouble.calls())
    office.ask(range(100, 120))
    office.flush()
    trouble.error = errno.EIO
    office.converse(1)
    office.flush()
    assert office.disk_state == "failing"
    trouble.gate.clear()  # the next write takes its time to fail
    office.memory.tick()
    assert office.ask([*range(100, 120), 7]).finished.cache.tier == "disk"
    trouble.gate.set()
    office.flush()
    assert [note.level for note in office.notes] == ["warning"]
    office.close()


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_blocks_that_only_waited_to_be_written_are_lost_and_nothing_breaks(
    tmp_path: Path, error: int
) -> None:
    """They had left RAM for the disk, later ones were put under them, then the disk failed."""
    trouble = Trouble(("open",))
    office = Office(FakeEngine(), load(tmp_path / "kv", ram_bytes=24_000), trouble.calls())
    trouble.gate.clear()
    talks = [[seed, *range(100, 130)] for seed in range(4)]
    for _ in range(3):
        talks = [[*tokens, *office.ask(tokens).tokens, 7] for tokens in talks]
    trouble.error = error
    trouble.gate.set()
    office.flush()
    for seed in range(4):
        office.converse(seed)
        office.flush()
    assert office.used_bytes_hold()
    office.close()


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENOMEM])
def test_a_want_of_handles_costs_no_block(tmp_path: Path, error: int) -> None:
    """It says nothing about the files: they are neither bad nor set aside."""
    office = Office(FakeEngine(), load(tmp_path / "kv"))
    reply = office.converse(1, turns=3)
    office.close()
    trouble = Trouble(("open",))
    again = Office(FakeEngine(), load(tmp_path / "kv"), trouble.calls())
    trouble.error = error
    assert again.ask(reply.turn.tokens).reused == 0
    trouble.error = None
    again.flush()
    assert again.tier.counts.corrupt_blocks == 0
    assert not list((again.tier.folder.path / "aside").iterdir())
    again.close()
