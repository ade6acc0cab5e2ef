"""Tests how a runtime opens its tiers, its entries and its secret."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from blake3 import blake3

from rekindle.errors import ConfigError
from rekindle.kvcache.disk.index_db import OLDER_VERSIONS
from rekindle.kvcache.entries.entry import Draft
from rekindle.kvcache.eviction.hit_density import AGES, CLASSES, HitDensity
from rekindle.protocol.frames import LogLine
from rekindle.protocol.requests import LoadModel
from rekindle.protocol.settings import RuntimeSettings
from rekindle.runtime.storage.opening import choose_budgets, open_storage
from rekindle.runtime.storage.storage import Storage, StorageEvent
from rekindle.tokens import Tokens
from tests.support.fake import FakeEngine

SECRET = bytes(range(32))
PATIENCE_S = 30.0


def opening(
    cache_dir: Path, log: list[LogLine], fingerprint: bytes = b"fake", **more: Any
) -> tuple[Storage, SimpleQueue[StorageEvent]]:
    settings = RuntimeSettings(ram_cache=1 << 26, disk_cache=1 << 26, cache_dir=cache_dir, **more)
    load = LoadModel(path="model", settings=settings)
    capabilities = FakeEngine(fingerprint=fingerprint).capabilities
    events = SimpleQueue[StorageEvent]()
    return open_storage(load, choose_budgets(load), capabilities, events.put, log.append), events


def opened(
    cache_dir: Path, log: list[LogLine], fingerprint: bytes = b"fake", **more: Any
) -> Storage:
    storage, events = opening(cache_dir, log, fingerprint, **more)
    while not storage.is_settled:  # the folder is opened by a thread of its own
        storage.on_event(events.get(timeout=PATIENCE_S))
    return storage


def test_a_store_has_its_tiers_in_order(tmp_path: Path) -> None:
    storage = opened(tmp_path, [])
    assert [tier.name for tier in storage.store.tiers] == ["ram", "disk"]
    storage.close()


def test_a_folder_that_is_being_loaded_is_reported(tmp_path: Path) -> None:
    storage, events = opening(tmp_path, [])
    assert (storage.is_on_disk, storage.conversations) == (True, None)
    while not storage.is_settled:
        storage.on_event(events.get(timeout=PATIENCE_S))
    assert (storage.is_on_disk, storage.conversations) == (True, 0)
    second = opened(tmp_path, [])
    assert not second.is_on_disk, "another process has the folder"
    second.close()
    storage.close()


def test_the_disk_can_be_turned_off(tmp_path: Path) -> None:
    settings = RuntimeSettings(ram_cache=1 << 26, disk_cache=0, cache_dir=tmp_path)
    load = LoadModel(path="model", settings=settings)
    storage = open_storage(
        load, choose_budgets(load), FakeEngine().capabilities, lambda _: None, lambda _: None
    )
    assert (storage.is_on_disk, storage.conversations) == (False, 0)
    storage.close()


def test_a_configured_secret_is_used_for_every_cache_folder(tmp_path: Path) -> None:
    file, log = tmp_path / "key", list[LogLine]()
    file.write_text(SECRET.hex() + "\n")
    for name in ("one", "two"):
        storage = opened(tmp_path / name, log, cache_secret_file=file)
        assert storage.secret == SECRET
        storage.close()
    assert log == []


def test_without_a_configured_secret_each_cache_folder_has_its_own(tmp_path: Path) -> None:
    first, second = opened(tmp_path / "one", []), opened(tmp_path / "two", [])
    assert first.secret != second.secret
    first.close()
    second.close()


def test_a_configured_secret_is_used_without_a_disk_too(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_bytes(SECRET)
    settings = RuntimeSettings(disk_cache=0, cache_secret_file=file)
    load = LoadModel(path="", settings=settings)
    storage = open_storage(
        load, choose_budgets(load), FakeEngine().capabilities, lambda _event: None, print
    )
    assert storage.secret == SECRET
    storage.close()


def test_state_of_another_engine_build_is_not_used_and_logged(tmp_path: Path) -> None:
    log = list[LogLine]()
    for fingerprint in (b"one build", b"another"):
        opened(tmp_path, log, fingerprint).close()
    [line] = log
    assert "another build of the engine" in line.text
    assert "not used" in line.text


@pytest.mark.parametrize("version", OLDER_VERSIONS)
def test_an_index_of_an_older_version_is_set_aside_with_one_log_line(
    tmp_path: Path, version: str
) -> None:
    first = opened(tmp_path, [])
    pinned = Draft(namespace=b"n" * 32, tokens=Tokens.of([1, 2, 3]), pinned=True)
    assert first.entries.remember(pinned) is not None
    first.close()
    [index] = tmp_path.glob("*/index.db")
    for path in (index, index.with_name("index.db.bak")):
        with closing(sqlite3.connect(path)) as db, db:
            db.execute("UPDATE meta SET value = ? WHERE key = 'schema'", (version,))
    log = list[LogLine]()
    second = opened(tmp_path, log)
    [line] = log
    set_aside = index.with_name("index.db.damaged")
    assert set_aside.is_file()
    assert str(set_aside) in line.text
    assert f"schema version {version}" in line.text
    assert (second.is_on_disk, second.conversations, len(second.store)) == (True, 0, 0)
    second.close()
    log.clear()
    opened(tmp_path, log).close()
    assert log == []


def test_an_index_that_was_set_aside_does_not_hide_bad_blocks(tmp_path: Path) -> None:
    opened(tmp_path, []).close()
    [index] = tmp_path.glob("*/index.db")
    for path in (index, index.with_name("index.db.bak")):
        path.write_bytes(b"garbage")
    (index.parent / "blocks" / ("a" * 64)).write_bytes(b"not a block")
    log = list[LogLine]()
    opened(tmp_path, log).close()
    [line] = log
    assert str(index.with_name("index.db.damaged")) in line.text
    assert "quarantined: 1" in line.text
    assert "lost: 0" in line.text


@pytest.mark.parametrize("content", [None, b"short", b"x" * 64])
def test_a_secret_that_cannot_be_used_is_refused(tmp_path: Path, content: bytes | None) -> None:
    """Continuing with another secret would silently share nothing."""
    file = tmp_path / "key"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match="key"):
        opened(tmp_path / "kv", [], cache_secret_file=file)


def test_the_ram_budget_includes_the_write_queue_and_fetches(
    tmp_path: Path,
) -> None:
    settings = RuntimeSettings(ram_cache=1 << 30, disk_cache=1 << 26, cache_dir=tmp_path)
    load = LoadModel(path="", settings=settings)
    storage = open_storage(
        load, choose_budgets(load), FakeEngine().capabilities, lambda _event: None, print
    )
    assert storage.disk is not None
    set_aside = storage.disk.queue_bytes + storage.store.fetches.limit_bytes
    assert storage.store.fetches.limit_bytes == 1 << 27
    assert storage.store.tiers[0].budget.limit_bytes == (1 << 30) - set_aside
    storage.close()


def test_what_eviction_has_learned_survives_a_restart(tmp_path: Path) -> None:
    first = opened(tmp_path, [])
    counts = [[[2.0] * AGES] * CLASSES, [[3.0] * AGES] * CLASSES]
    tiers = (tier.budget.estimator for tier in first.store.tiers)
    for estimator in (*tiers, first.device_estimator):
        estimator.load(counts)
    first.close()
    second = opened(tmp_path, [])
    assert [tier.budget.estimator.dump() for tier in second.store.tiers] == [counts, counts]
    assert second.device_estimator.dump() == counts
    second.close()


def test_a_policy_state_that_is_damaged_or_older_is_ignored(tmp_path: Path) -> None:
    opened(tmp_path, []).close()
    (file,) = tmp_path.glob("*/learnt")
    payload = b'{"ram": {"counts": [], "favourite": "frequency"}}'
    older = b"rekindle learnt 2\n" + blake3(payload).digest() + payload
    for content in (b"", b"rekindle learnt 9\n", bytes(1000), older):
        file.write_bytes(content)
        storage = opened(tmp_path, [])
        assert storage.disk is not None
        assert storage.disk.is_open
        assert storage.store.tiers[0].budget.estimator.dump() == HitDensity().dump()
        storage.close()
