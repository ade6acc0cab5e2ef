"""Acknowledged state survives `kill -9`, and other state is never half written."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from rekindle.kvcache.tiers.disk import MIN_INDEX_BYTES
from tests.stress.aftermath import PLENTY_BYTES, index_agrees_with_files, promises_are_kept
from tests.stress.diary import Diary, Promises
from tests.stress.writer import Order, writing
from tests.support.fake import FakeEngine
from tests.support.harness import RuntimeHarness
from tests.support.rounds import rounds

ROUNDS = rounds(18, 54)
FIRST_CALLS = range(1, 19)  # the system calls of the first blocks
SMALL_BYTES = MIN_INDEX_BYTES + (1 << 20)  # a few hundred blocks


@pytest.mark.long
def test_acknowledged_state_survives_every_kill(tmp_path: Path) -> None:
    """The first half of the rounds has space for everything. The second half evicts."""
    chance = random.Random(9)
    orders = [
        Order(
            folder=str(tmp_path / "kv"),
            diary=str(tmp_path / "diary"),
            seed=round_,
            disk_bytes=PLENTY_BYTES if round_ < ROUNDS // 2 else SMALL_BYTES,
            kill_after_s=chance.uniform(0.03, 0.25),
        )
        for round_ in range(ROUNDS)
    ]
    promises = survive(orders, chance)
    assert len(promises.blocks) > 20
    assert promises.entries
    assert promises.answers > 5
    assert promises.stored_documents > 5
    assert promises.documents


@pytest.mark.long
def test_acknowledged_state_survives_a_kill_before_any_system_call(tmp_path: Path) -> None:
    """The most critical moment is between renaming a file and committing its row in the index."""
    chance = random.Random(10)
    first = sorted(chance.sample(FIRST_CALLS, rounds(6, len(FIRST_CALLS))))
    later = [chance.randrange(FIRST_CALLS.stop, 400) for _ in range(rounds(4, 12))]
    orders = [
        Order(
            folder=str(tmp_path / "kv"),
            diary=str(tmp_path / "diary"),
            seed=1000 + count,
            disk_bytes=PLENTY_BYTES,
            kill_after_s=0.3,
            exit_at_call=count,
        )
        for count in (*first, *later)
    ]
    assert survive(orders, chance).blocks


def test_a_kill_between_a_replaced_block_and_its_row_needs_no_repair(tmp_path: Path) -> None:
    """An exact block replaced another block, and the index still describes the old one."""
    tokens = list(range(100, 140))
    harness = RuntimeHarness(FakeEngine(), folder=tmp_path / "live", idle_tokens=0)
    harness.ask(tokens)
    harness.flush()
    shutil.copytree(tmp_path / "live", tmp_path / "killed")
    harness.ask(tokens, exact=True)
    harness.close()
    replaced = 0
    for old in (tmp_path / "killed").glob("*/blocks/*"):
        new = tmp_path / "live" / old.relative_to(tmp_path / "killed")
        replaced += new.read_bytes() != old.read_bytes()
        shutil.copyfile(new, old)
    assert replaced
    index_agrees_with_files(tmp_path / "killed")
    again = RuntimeHarness(FakeEngine(), folder=tmp_path / "killed")
    assert again.ask(tokens).tokens == RuntimeHarness(FakeEngine()).ask(tokens).tokens
    again.close()


def survive(orders: list[Order], chance: random.Random) -> Promises:
    """Run the orders, and check the folder after each of them."""
    folder, diary = Path(orders[0].folder), Diary(Path(orders[0].diary))
    promises = Promises()
    with writing() as write:
        for order in orders:
            write(order)
            promises = diary.read()
            assert not promises.errors, promises.errors[0]
            index_agrees_with_files(folder)
            promises_are_kept(folder, diary, chance, disk_bytes=order.disk_bytes)
    diary.close()
    return promises
