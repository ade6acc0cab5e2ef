"""Tests how budgets are chosen, and the capacities that a runtime reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rekindle.kvcache.disk.folder import open_folder
from rekindle.kvcache.tiers.disk import DiskTier
from rekindle.kvcache.tiers.ram import RamTier
from rekindle.protocol.frames import DISK, PARKED, POOL, RAM, Capacity
from rekindle.protocol.requests import LoadModel
from rekindle.protocol.settings import GB, GIB, RuntimeSettings
from rekindle.runtime.storage.opening import Budgets, Machine, capacities, choose_budgets
from tests.support.fake import FakeEngine
from tests.support.memory_tier import MemoryTier


class Readings(Machine):
    """A machine with the free memory and disk that a test wants."""

    def __init__(self, memory_bytes: int, disk_bytes: int) -> None:
        self.memory_bytes, self.disk_bytes = memory_bytes, disk_bytes

    def free_memory_bytes(self) -> int:
        return self.memory_bytes

    def free_disk_bytes(self, folder: Path) -> int:
        return self.disk_bytes


class Unread(Machine):
    def free_memory_bytes(self) -> int:
        raise AssertionError("nobody needs to know")

    def free_disk_bytes(self, folder: Path) -> int:
        raise AssertionError("nobody needs to know")


def load(path: Path = Path("none.gguf"), models: int = 1, **told: Any) -> LoadModel:
    served = [str(number) for number in range(models)]
    return LoadModel(path=str(path), served=served, settings=RuntimeSettings(**told))


def budgets(memory_bytes: int, disk_bytes: int, **order: Any) -> Budgets:
    return choose_budgets(load(**order), Readings(memory_bytes, disk_bytes))


@pytest.mark.parametrize(
    ("free_bytes", "ram_bytes"),
    [
        (128 * GIB, 32 * GIB),
        (10 * GIB, 2.5 * GIB),
        (8 * GIB, 2 * GIB),
        (3 * GIB, 2 * GIB),
        (2 * GIB, 2 * GIB),
        (1 * GIB, GIB // 4),
        (0, 0),
    ],
)
def test_the_ram_budget_is_a_quarter_of_free_memory_and_at_least_2_gib(
    free_bytes: int, ram_bytes: int
) -> None:
    assert budgets(free_bytes, 0).ram_bytes == ram_bytes


@pytest.mark.parametrize(
    ("free_bytes", "disk_bytes"), [(2000 * GB, 200 * GB), (50 * GB, 10 * GB), (0, 10 * GB)]
)
def test_the_disk_budget_is_a_tenth_of_free_space_and_at_least_10_gb(
    free_bytes: int, disk_bytes: int
) -> None:
    assert budgets(0, free_bytes).disk_bytes == disk_bytes


def test_models_of_one_server_share_the_quarter() -> None:
    assert budgets(128 * GIB, 0, models=4).ram_bytes == 8 * GIB


def test_weights_count_as_loaded(tmp_path: Path) -> None:
    """The memory is measured before the weights are loaded."""
    parts = [tmp_path / f"model-{number:05}-of-00002.gguf" for number in (1, 2)]
    for part in parts:
        part.touch()
        with part.open("r+b") as file:
            file.truncate(4 * GIB)
    assert budgets(40 * GIB, 0, path=parts[0]).ram_bytes == 8 * GIB
    assert budgets(40 * GIB, 0, path=tmp_path).ram_bytes == 8 * GIB
    assert budgets(5 * GIB, 0, path=tmp_path).ram_bytes == 0


def test_configured_budgets_are_used_without_measuring() -> None:
    assert choose_budgets(load(ram_cache=5, disk_cache=0), Unread()) == Budgets(5, 0)


def test_one_budget_can_be_configured_and_the_other_chosen() -> None:
    assert budgets(128 * GIB, 2000 * GB, disk_cache=GB) == Budgets(32 * GIB, GB)


def test_space_that_the_cache_takes_counts_as_free(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there"
    before_bytes = Machine().free_disk_bytes(folder)
    assert before_bytes > 0
    folder.mkdir(parents=True)
    (folder / "block").touch()
    with (folder / "block").open("r+b") as file:
        file.truncate(1 << 40)  # takes nothing of the disk, and counts all the same
    assert Machine().free_disk_bytes(folder) > 1 << 40


def test_a_disk_that_cannot_be_measured_has_no_free_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_path: Path) -> None:
        raise OSError("no such device")

    monkeypatch.setattr("shutil.disk_usage", refuse)
    assert Machine().free_disk_bytes(tmp_path) == 0


def test_pool_parking_and_tiers_are_counted_in_tokens_of_the_model() -> None:
    engine = FakeEngine(park_tokens=300)
    each = engine.capabilities.kv_layout.token_bytes
    pool, parked, ram = capacities(engine, [RamTier(7 * each + 1)])
    assert pool == Capacity(POOL, engine.pool_tokens, engine.pool_tokens * each)
    assert parked == Capacity(PARKED, 300, 300 * each)
    assert ram == Capacity(RAM, 7, 7 * each + 1)


def test_capacities_list_every_open_tier() -> None:
    further, opening = (MemoryTier(size, lambda _event: None) for size in (1000, 0))
    opening.is_open = False
    places = [
        capacity.place for capacity in capacities(FakeEngine(), [RamTier(0), further, opening])
    ]
    assert places == [POOL, RAM, "memory"]


@pytest.mark.parametrize(
    ("free_bytes", "used_bytes", "capacity_bytes"),
    [
        (3_000_000, 0, 2_000_000),
        (3_000_000, 500_000, 2_500_000),
        (900_000, 0, 0),
        (10**15, 0, None),
    ],
)
def test_a_disk_holds_no_more_than_its_space_above_the_floor(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    free_bytes: int,
    used_bytes: int,
    capacity_bytes: int | None,
) -> None:
    """A 3 MB disk once announced 9.6 GB."""
    folder = open_folder(tmp_path / "kv", b"model", limit_bytes=10 * GB)
    monkeypatch.setattr(folder.block_files, "free_bytes", lambda: free_bytes)
    tier = DiskTier(folder, lambda _event: None, floor_bytes=1_000_000)
    tier.budget.used_bytes = used_bytes
    *_, disk = capacities(FakeEngine(), [tier])
    tier.close()
    size_bytes = tier.budget.limit_bytes if capacity_bytes is None else capacity_bytes
    token_bytes = FakeEngine().capabilities.kv_layout.token_bytes
    assert disk == Capacity(DISK, size_bytes // token_bytes, size_bytes)
