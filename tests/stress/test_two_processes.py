"""One process owns a cache folder. A second process uses RAM, warns, and disturbs nobody."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from rekindle.errors import CorruptBlock, FolderLocked
from rekindle.kvcache.block import chain_key
from rekindle.kvcache.disk.check import check
from rekindle.kvcache.disk.folder import model_folders, open_block_files, open_folder
from rekindle.kvcache.disk.secret import read_secret
from rekindle.kvcache.tiers.disk import MIN_INDEX_BYTES
from rekindle.protocol.admin import EntryInfo, PinEntry
from rekindle.protocol.requests import Names
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
from tests.support.rounds import rounds
from tests.support.server import running
from tests.support.tiny import write_llama

WRITING_S = float(rounds(3, 30))
SMALL_BYTES = MIN_INDEX_BYTES + (1 << 20)  # a few hundred blocks


def open_harness(folder: Path) -> StorageHarness:
    return StorageHarness(FakeEngine(), load(folder))


def test_the_second_process_uses_ram_until_the_first_has_ended(tmp_path: Path) -> None:
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


def test_the_second_process_takes_over_the_folder_when_the_first_has_ended(tmp_path: Path) -> None:
    """This happens after a quick restart, when the old process still holds the folder.

    State that was kept in RAM in the meantime and all state of the first process are preserved.
    """
    first, second = open_harness(tmp_path), open_harness(tmp_path)
    reply = first.converse(2, turns=3)
    named = second.ask(range(300, 320), names=Names(session_id="mine", return_cache_key=True))
    key = named.finished.cache.new_cache_key
    assert key is not None
    answer = second.administer(PinEntry(key, pinned=True))
    assert isinstance(answer, EntryInfo)
    assert not answer.durable
    first.close()
    while second.disk_state != "ok":
        second.take_events(wait=True)
    assert [line.level for line in second.log_lines] == ["warning", "info"]
    assert second.ask([*reply.turn.tokens, 9]).finished.cache.tier == "disk"
    second.close()
    third = open_harness(tmp_path)
    assert third.entries.by_name(third.namespace(), ("session_id", "mine"))
    assert [entry.key for entry in third.entries.of(None) if entry.pinned] == [key]
    assert third.ask([*range(300, 320), 7]).finished.cache.tier == "disk"
    third.close()


@pytest.mark.long
def test_a_second_process_neither_waits_for_a_writer_nor_disturbs_it(tmp_path: Path) -> None:
    """Other processes claim the folder, check it, read its files, use another model's folder and
    collect idle files, while the owner writes and evicts."""
    home, diary = tmp_path / "kv", Diary(tmp_path / "diary")
    order = Order(
        folder=str(home),
        diary=str(tmp_path / "diary"),
        seed=5,
        disk_bytes=SMALL_BYTES,
        kill_after_s=WRITING_S,
        kill_with=str(tmp_path / "enough"),
    )
    with writing() as write, ThreadPoolExecutor(2) as others:
        owner = others.submit(write, order)
        try:
            while not diary.read().blocks:
                assert not owner.done()
            path = owned(home)
            reads = others.submit(read_until, path, Path(order.kill_with))
            until_s = time.monotonic() + WRITING_S
            visit(home, path)
            while time.monotonic() < until_s:
                visit(home, path)
        finally:
            Path(order.kill_with).touch()
        owner.result()
        assert reads.result()
    assert not diary.read().errors
    index_agrees_with_files(home)
    promises_are_kept(home, diary, random.Random(0), disk_bytes=SMALL_BYTES)
    diary.close()


def owned(home: Path) -> Path:
    """The folder of the model that the owner works for."""
    [path] = (report.path for report in check(home, repair=False) if report.in_use)
    return path


def read_until(path: Path, enough: Path) -> int:
    """Read the owner's files and count them.

    Each one is what its name says, or was just removed.
    """
    chance, reads = random.Random(3), 0
    with ExitStack() as resources:
        block_files = open_block_files(path, read_secret(path.parent), resources)
        while not enough.exists():
            sizes = block_files.sizes()
            for key in chance.sample(sorted(sizes), min(len(sizes), 20)):
                with suppress(CorruptBlock):
                    record = block_files.read(key, sizes[key])
                    assert chain_key(record.parent, record.tokens) == key
                    reads += 1
    return reads


def visit(home: Path, path: Path) -> None:
    with pytest.raises(FolderLocked):
        open_folder(home, identity(), limit_bytes=PLENTY_BYTES)
    assert [report.in_use for report in check(home, repair=True)].count(True) == 1
    neighbour = open_harness(home)  # of another model
    assert neighbour.disk_state == "ok"
    neighbour.converse(1)
    neighbour.close()
    collector = open_folder(home, b"a third model", limit_bytes=1)
    assert {path.name for path in model_folders(home)} == {collector.path.name, path.name}
    collector.close()


def test_two_servers_with_one_folder_both_answer(tmp_path: Path) -> None:
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
