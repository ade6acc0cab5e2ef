"""A full disk costs only reuse.

Requests are answered, there is one warning, and the disk is used again when it has free space.
These tests mount file systems of a few megabytes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import DEVNULL

import pytest

from tests.stress.storage_harness import StorageHarness, load
from tests.support.fake import FakeEngine

MB = 1 << 20
Mount = Callable[[int], Path]


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """Mounts small file systems of a given size. Needs permission to mount."""
    with contextlib.ExitStack() as stack:

        def mounted(size_bytes: int) -> Path:
            path = tmp_path / "disk"
            path.mkdir()
            command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(path)]
            if shutil.which("mount") is None or subprocess.run(command, stderr=DEVNULL).returncode:
                pytest.skip("file systems cannot be mounted here")
            stack.callback(subprocess.run, ["umount", "--lazy", str(path)], check=True)
            return path

        yield mounted


def free_bytes(path: Path) -> int:
    system = os.statvfs(path)
    return system.f_bavail * system.f_frsize


def fill(disk: Path) -> Path:
    """Another program's file that takes all free space."""
    path = disk / "somebody else's"
    with path.open("wb") as file, contextlib.suppress(OSError):
        while left := free_bytes(disk):
            file.write(bytes(min(1 << 16, left)))
            file.flush()
    return path


def open_on(disk: Path, **more: int) -> StorageHarness:
    return StorageHarness(FakeEngine(), load(disk / "kv", **more))


def test_a_full_disk_causes_one_warning_and_is_used_again_when_it_has_space(mount: Mount) -> None:
    disk = mount(3 * MB)
    harness = open_on(disk)
    harness.converse(1)
    harness.flush()
    stored = harness.stored_blocks
    assert stored
    assert not harness.warnings
    other = fill(disk)
    for seed in range(2, 12):
        harness.converse(seed)
        harness.flush()
    assert harness.disk_state == "full"
    assert len(harness.warnings) == 1
    assert "full" in harness.warnings[0]
    other.unlink()
    harness.tick()
    for seed in range(12, 15):
        harness.converse(seed)
    harness.flush()
    assert harness.disk_state == "ok"
    assert harness.stored_blocks > stored
    assert len(harness.warnings) == 1
    harness.close()


def test_repeated_writes_to_a_full_disk_cause_one_warning(mount: Mount) -> None:
    disk = mount(3 * MB)
    harness = open_on(disk)
    first = harness.converse(1)
    harness.flush()
    fill(disk)
    for seed in range(2, 8):
        harness.tick()
        harness.flush()
        harness.ask([*first.turn.tokens, seed])
        harness.converse(seed)
        harness.flush()
    assert [note.level for note in harness.log_lines] == ["warning"]
    harness.close()


def test_stored_state_stays_when_another_program_fills_the_disk(mount: Mount) -> None:
    """Stored state stays, and a restart on the full disk can still read it."""
    disk = mount(3 * MB)
    harness = open_on(disk)
    reply = harness.converse(1, turns=3)
    harness.close()
    fill(disk)
    again = open_on(disk)
    assert again.ask([*reply.turn.tokens, 9]).finished.cache.tier == "disk"
    again.converse(2)
    again.close()


def test_with_a_disk_full_from_the_start_ram_is_used(mount: Mount) -> None:
    disk = mount(2 * MB)
    fill(disk)
    harness = open_on(disk)
    assert harness.disk_state == "failing"
    assert harness.disk_state == "failing"
    assert harness.converse(1, turns=3).finished.cache.tier == "ram"
    assert len(harness.warnings) == 1
    harness.close()


def test_the_cache_leaves_the_configured_free_space(mount: Mount) -> None:
    """The index may use a little of this space, because it is always written."""
    disk = mount(6 * MB)
    harness = open_on(disk, disk_floor=3 * MB)
    for seed in range(150):
        harness.converse(seed, turns=1)
        harness.flush()
        assert free_bytes(disk) > 3 * MB - MB // 2
    assert harness.disk_state == "full"
    assert len(harness.warnings) == 1
    assert harness.stored_blocks > 10
    harness.close()


def test_with_a_read_only_disk_ram_is_used(mount: Mount) -> None:
    disk = mount(4 * MB)
    open_on(disk).close()
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    harness = open_on(disk)
    assert harness.disk_state == "failing"
    assert len(harness.warnings) == 1
    assert harness.converse(1, turns=3).finished.cache.tier == "ram"
    harness.close()
