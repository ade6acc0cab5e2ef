"""What a runtime opens at its start: tiers, entries, and the secret that blocks are sealed with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rekindle.protocol.frames import LogLine
from rekindle.protocol.requests import LoadModel
from rekindle.runtime.storage import Memory
from tests.support.fake import FakeEngine

SECRET = bytes(range(32))


def opened(cache_dir: Path, log: list[LogLine], **more: Any) -> Memory:
    load = LoadModel(
        path="",
        parallel=1,
        context_tokens=None,
        kv_fraction=0.5,
        threads=1,
        gpu_layers=None,
        ram_bytes=1 << 26,
        disk_bytes=1 << 26,
        cache_dir=str(cache_dir),
        **more,
    )
    return Memory(load, FakeEngine().abilities, lambda _event: None, log.append)


def test_a_store_has_its_tiers_in_order(tmp_path: Path) -> None:
    memory = opened(tmp_path, [])
    assert [tier.name for tier in memory.store.tiers] == ["ram", "disk"]
    memory.close()


def test_a_configured_secret_is_that_of_every_cache_folder(tmp_path: Path) -> None:
    file, log = tmp_path / "key", list[LogLine]()
    file.write_text(SECRET.hex() + "\n")
    for name in ("one", "two"):
        memory = opened(tmp_path / name, log, cache_secret_file=str(file))
        assert memory.secret == SECRET
        memory.close()
    assert log == []


def test_without_one_each_cache_folder_has_its_own(tmp_path: Path) -> None:
    first, second = opened(tmp_path / "one", []), opened(tmp_path / "two", [])
    assert first.secret != second.secret
    first.close()
    second.close()


def test_a_secret_that_cannot_be_used_costs_the_disk_and_is_explained(tmp_path: Path) -> None:
    log = list[LogLine]()
    memory = opened(tmp_path, log, cache_secret_file=str(tmp_path / "missing"))
    assert [tier.name for tier in memory.store.tiers] == ["ram"]
    assert memory.trouble == "failing"
    assert "missing" in log[0].text
    memory.close()
