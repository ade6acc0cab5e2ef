"""One process owns a cache folder; another that comes gets a warning and RAM, and disturbs nobody."""

from __future__ import annotations

import random
import threading
from pathlib import Path

from rekindle.cache.check import check
from tests.stress.diary import Diary
from tests.stress.office import Office, load
from tests.stress.test_kill import PLENTY_BYTES, index_agrees_with_files, promises_are_kept
from tests.stress.writer import Order, writing
from tests.support.fake import FakeEngine


def office(folder: Path) -> Office:
    return Office(FakeEngine(), load(folder))


def test_the_second_works_in_ram_until_the_first_has_gone(tmp_path: Path) -> None:
    first, second = office(tmp_path), office(tmp_path)
    assert (first.disk_state, second.disk_state) == ("ok", "locked")
    assert not first.warnings
    [warning] = second.warnings
    assert "Another process" in warning
    assert second.converse(1, turns=3).finished.cache.tier == "ram"
    reply = first.converse(2, turns=3)
    second.close()
    first.close()
    third = office(tmp_path)
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
    promises_are_kept(order, diary, random.Random(0))
    diary.close()


def visit(home: Path) -> None:
    with pytest.raises(FolderLocked):
        open_folder(home, IDENTITY, limit_bytes=PLENTY_BYTES)
    assert [each.path for each in check(home, repair=True) if each.in_use] == [folder_of(IDENTITY)]
    neighbour = office(home)  # of another model
    assert neighbour.disk_state == "ok"
    neighbour.converse(1)
    neighbour.close()
