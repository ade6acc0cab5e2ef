"""Free memory is limited by the machine and by its cgroups."""

from __future__ import annotations

from pathlib import Path

import pytest

from rekindle.memory import host_free_bytes

MIB = 1 << 20
UNLIMITED = 9_223_372_036_854_771_712  # version 1 writes this for no limit


def machine(root: Path, available_mib: int, membership: str = "0::/") -> None:
    write(root / "proc/meminfo", f"MemTotal: 99 kB\nMemAvailable: {available_mib * 1024} kB\n")
    write(root / "proc/self/cgroup", membership + "\n")


def group(root: Path, limit: str, used_mib: int, cache_mib: int = 0) -> None:
    """A group of cgroups version 2."""
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


def test_without_cgroups_the_available_memory_of_the_machine_counts(tmp_path: Path) -> None:
    machine(tmp_path, 500)
    assert host_free_bytes(tmp_path) == 500 * MIB


def test_a_container_has_its_limit_minus_usage_plus_reclaimable_file_cache(
    tmp_path: Path,
) -> None:
    machine(tmp_path, 9000)
    group(tmp_path / "sys/fs/cgroup", str(1000 * MIB), used_mib=700, cache_mib=100)
    assert host_free_bytes(tmp_path) == 400 * MIB


def test_the_tightest_parent_group_counts(tmp_path: Path) -> None:
    machine(tmp_path, 9000, "0::/outer/inner")
    cgroup = tmp_path / "sys/fs/cgroup"
    group(cgroup / "outer", str(800 * MIB), used_mib=700)
    group(cgroup / "outer/inner", "max", used_mib=300)
    assert host_free_bytes(tmp_path) == 100 * MIB


def test_the_machine_counts_if_it_has_less_than_the_limit(tmp_path: Path) -> None:
    machine(tmp_path, 50)
    group(tmp_path / "sys/fs/cgroup", str(1000 * MIB), used_mib=100)
    assert host_free_bytes(tmp_path) == 50 * MIB


def test_version_1_groups_count_even_with_the_path_of_the_host(tmp_path: Path) -> None:
    machine(tmp_path, 9000, "5:cpu:/x\n4:memory:/docker/0123\n0::/")
    old_group(tmp_path / "sys/fs/cgroup/memory", 600 * MIB, used_mib=200, cache_mib=50)
    assert host_free_bytes(tmp_path) == 450 * MIB


def test_a_group_without_a_limit_changes_nothing(tmp_path: Path) -> None:
    machine(tmp_path, 700, "4:memory:/\n0::/")
    old_group(tmp_path / "sys/fs/cgroup/memory", UNLIMITED, used_mib=200)
    group(tmp_path / "sys/fs/cgroup", "max", used_mib=200)
    assert host_free_bytes(tmp_path) == 700 * MIB


def test_a_full_group_leaves_no_memory(tmp_path: Path) -> None:
    machine(tmp_path, 700)
    group(tmp_path / "sys/fs/cgroup", str(100 * MIB), used_mib=101)
    assert host_free_bytes(tmp_path) == 0


@pytest.mark.parametrize("damaged", ["", "garbage", "12 kB"])
def test_an_unreadable_group_is_ignored(tmp_path: Path, damaged: str) -> None:
    machine(tmp_path, 700)
    group(tmp_path / "sys/fs/cgroup", damaged, used_mib=1)
    assert host_free_bytes(tmp_path) == 700 * MIB


def test_this_machine_has_free_memory() -> None:
    assert host_free_bytes() > MIB
