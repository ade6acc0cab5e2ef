"""One process owns a cache folder; who comes next has RAM and a warning, and disturbs nobody."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import pytest

from rekindle.errors import FolderLocked
from rekindle.kvcache.disk.check import check
from rekindle.kvcache.disk.folder import open_folder
from tests.stress.aftermath import (
    PLENTY_BYTES,
    identity,
    index_agrees_with_files,
    promises_are_kept,
)
from tests.stress.diary import Diary
from tests.stress.storage_harness import StorageHarness, load
from tests.stress.writer import Order, writing
from tests.support.fake import FakeEngine
from tests.support.server import running
from tests.support.tiny import write_llama

WRITING_S = 3.0


def open_harness(folder: Path) -> StorageHarness:
    return StorageHarness(FakeEngine(), load(folder))


def test_the_second_works_in_ram_until_the_first_has_gone(tmp_path: Path) -> None:
    first, second = open_harness(tmp_path), open_harness(tmp_path)
    assert (first.disk_state, second.disk_state) == ("ok", "locked")
    assert not first.warnings
    [warning] = second.warnings
    assert "Another process" in warning
    assert second.converse(1, turns=3).finished.cache.tier == "ram"
    reply = first.converse(2, turns=3)
    second.close()
    first.close()
    third = open_harness(tmp_path)
    assert third.disk_state == "ok"
    assert third.ask([*reply.turn.tokens, 9]).finished.cache.tier == "disk"
    third.close()


def test_who_comes_while_another_writes_neither_waits_nor_disturbs(tmp_path: Path) -> None:
    """Others claim the folder, check it, and work on another model's beside it."""
    home, diary = tmp_path / "kv", Diary(tmp_path / "diary")
    order = Order(
        folder=str(home),
        diary=str(tmp_path / "diary"),
        seed=5,
        disk_bytes=PLENTY_BYTES,
        kill_after_s=WRITING_S,
    )
    visits = 0
    safe_until_s = time.monotonic() + WRITING_S  # it is killed later than that
    with writing() as write:
        owner = threading.Thread(target=write, args=(order,))
        owner.start()
        while not diary.read().blocks:
            assert owner.is_alive()
        while time.monotonic() < safe_until_s:
            visit(home)
            visits += 1
        owner.join()
    assert visits
    assert not diary.read().errors
    index_agrees_with_files(home)
    promises_are_kept(home, diary, random.Random(0))
    diary.close()


def visit(home: Path) -> None:
    with pytest.raises(FolderLocked):
        open_folder(home, identity(), limit_bytes=PLENTY_BYTES)
    assert [report.in_use for report in check(home, repair=True)].count(True) == 1
    neighbour = open_harness(home)  # of another model
    assert neighbour.disk_state == "ok"
    neighbour.converse(1)
    neighbour.close()


def test_two_servers_on_one_folder_both_answer(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "tiny.gguf")
    flags = ("--threads", "1", "--cache-dir", str(tmp_path / "kv"), "--disk-floor", "0")
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "temperature": 0}
    answers = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    with (
        running(model, tmp_path / "one", *flags) as one,
        running(model, tmp_path / "two", *flags) as two,
    ):
        for server in (one, two, one, two):
            with server.client() as client:
                answers.append(client.post("/v1/chat/completions", json=body).json())
        assert "Another process is using" not in one.log.read_text()
        assert two.log.read_text().count("Another process is using") == 1
    assert len({answer["choices"][0]["message"]["content"] for answer in answers}) == 1
    assert [answer["x_cache"]["hit"] for answer in answers] == [False, False, True, True]
