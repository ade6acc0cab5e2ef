"""Free memory, as a machine and its control groups say."""

from __future__ import annotations

from pathlib import Path

import pytest

from rekindle.memory import host_free_bytes

MIB = 1 << 20
UNLIMITED = 9_223_372_036_854_771_712  # how version 1 says that there is no limit


def machine(root: Path, available_mib: int, membership: str = "0::/") -> None:
    write(root / "proc/meminfo", f"MemTotal: 99 kB\nMemAvailable: {available_mib * 1024} kB\n")
    write(root / "proc/self/cgroup", membership + "\n")


def group(root: Path, limit: str, used_mib: int, cache_mib: int = 0) -> None:
    """A group of version 2."""
    write(root / "memory.max", limit)
    write(root / "memory.current", str(used_mib * MIB))
    write(root / "memory.stat", f"anon 5\ninactive_file {cache_mib * MIB}\n")


def old_group(root: Path, limit: int, used_mib: int, cache_mib: int = 0) -> None:
    write(root / "memory.limit_in_bytes", str(limit))
    write(root / "memory.usage_in_bytes", str(used_mib * MIB))
    write(root / "memory.stat", f"cache 5\ntotal_inactive_file {cache_mib * MIB}\n")


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_without_groups_it_is_what_the_machine_has_available(tmp_path: Path) -> None:
    machine(tmp_path, 500)
    assert host_free_bytes(tmp_path) == 500 * MIB


def test_a_container_has_what_its_limit_leaves_and_what_its_file_cache_gives_back(
    tmp_path: Path,
) -> None:
    machine(tmp_path, 9000)
    group(tmp_path / "sys/fs/cgroup", str(1000 * MIB), used_mib=700, cache_mib=100)
    assert host_free_bytes(tmp_path) == 400 * MIB


def test_the_tightest_of_the_groups_around_it_counts(tmp_path: Path) -> None:
    machine(tmp_path, 9000, "0::/outer/inner")
    cgroup = tmp_path / "sys/fs/cgroup"
    group(cgroup / "outer", str(800 * MIB), used_mib=700)
    group(cgroup / "outer/inner", "max", used_mib=300)
    assert host_free_bytes(tmp_path) == 100 * MIB


def test_a_machine_with_less_than_the_limit_counts(tmp_path: Path) -> None:
    machine(tmp_path, 50)
    group(tmp_path / "sys/fs/cgroup", str(1000 * MIB), used_mib=100)
    assert host_free_bytes(tmp_path) == 50 * MIB


def test_groups_of_version_1_count_also_where_their_path_is_the_hosts(tmp_path: Path) -> None:
    machine(tmp_path, 9000, "5:cpu:/x\n4:memory:/docker/0123\n0::/")
    old_group(tmp_path / "sys/fs/cgroup/memory", 600 * MIB, used_mib=200, cache_mib=50)
    assert host_free_bytes(tmp_path) == 450 * MIB


def test_a_group_without_a_limit_changes_nothing(tmp_path: Path) -> None:
    machine(tmp_path, 700, "4:memory:/\n0::/")
    old_group(tmp_path / "sys/fs/cgroup/memory", UNLIMITED, used_mib=200)
    group(tmp_path / "sys/fs/cgroup", "max", used_mib=200)
    assert host_free_bytes(tmp_path) == 700 * MIB


def test_a_group_that_is_full_leaves_nothing(tmp_path: Path) -> None:
    machine(tmp_path, 700)
    group(tmp_path / "sys/fs/cgroup", str(100 * MIB), used_mib=101)
    assert host_free_bytes(tmp_path) == 0


@pytest.mark.parametrize("damaged", ["", "garbage", "12 kB"])
def test_a_group_that_cannot_be_read_is_left_out(tmp_path: Path, damaged: str) -> None:
    machine(tmp_path, 700)
    group(tmp_path / "sys/fs/cgroup", damaged, used_mib=1)
    assert host_free_bytes(tmp_path) == 700 * MIB


def test_this_machine_has_some() -> None:
    assert host_free_bytes() > MIB
