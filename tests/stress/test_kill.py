"""What was acknowledged survives `kill -9`, and what was not is never half there."""

from __future__ import annotations

import random
from pathlib import Path

from rekindle.cache.check import check
from rekindle.cache.disk import LEAST_INDEX_BYTES
from rekindle.cache.folder import open_folder
from tests.stress.diary import Diary, Promises, WitnessedDesk
from tests.stress.writer import Order, writing
from tests.support.desk import Desk
from tests.support.fake import FakeEngine

ROUNDS = 56
PLENTY_BYTES = 1 << 30
SMALL_BYTES = LEAST_INDEX_BYTES + (1 << 20)  # a few hundred blocks
SAMPLES = 4


def test_what_was_acknowledged_survives_every_kill(tmp_path: Path) -> None:
    """The first half of the rounds has room for everything, the second evicts."""
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
    assert len(promises.blocks) > 50
    assert promises.entries


def test_what_was_acknowledged_survives_an_end_in_front_of_any_system_call(tmp_path: Path) -> None:
    """Most of all between a file's new name and the index that is to know of it."""
    chance = random.Random(10)
    orders = [
        Order(
            folder=str(tmp_path / "kv"),
            diary=str(tmp_path / "diary"),
            seed=1000 + count,
            disk_bytes=PLENTY_BYTES,
            kill_after_s=0.3,
            exit_at_call=count,
        )
        for count in (*range(1, 25), *(chance.randrange(25, 400) for _ in range(16)))
    ]
    assert survive(orders, chance).blocks


def survive(orders: list[Order], chance: random.Random) -> Promises:
    """Carry the orders out, and look at what each of them left."""
    folder, diary = Path(orders[0].folder), Diary(Path(orders[0].diary))
    promises = Promises()
    with writing() as write:
        for order in orders:
            write(order)
            promises = diary.read()
            assert not promises.errors, promises.errors[0]
            index_agrees_with_files(folder)
            promises_are_kept(order, diary, chance)
    diary.close()
    return promises


def index_agrees_with_files(folder: Path) -> None:
    """Opening may mend what the end has left; after it there is nothing to mend."""
    abilities = FakeEngine().abilities
    identity = abilities.fingerprint + b"%d" % abilities.block_tokens
    opened = open_folder(folder, identity, limit_bytes=PLENTY_BYTES)
    assert not opened.recovery.rebuilt, "a kill damages no index"
    assert not opened.recovery.aside, "a kill tears no file"
    opened.close()
    [report] = check(folder, repair=False)
    assert report.findings == ()


def promises_are_kept(order: Order, diary: Diary, chance: random.Random) -> None:
    folder = Path(order.folder)
    desk = WitnessedDesk(FakeEngine(), diary=diary, folder=folder, disk_bytes=order.disk_bytes)
    promises = diary.read()  # opening with a smaller budget may have evicted
    assert promises.blocks.keys() <= {block.key.hex() for block in desk.store if block.stored}
    known = {entry.key: entry.pinned for entry in desk.entries.of(None)}
    assert promises.entries <= known.keys()
    assert all(known[key] for key in promises.pinned)
    for key in chance.sample(sorted(promises.blocks), min(SAMPLES, len(promises.blocks))):
        if found := diary.read().blocks.get(key):  # an answer before may have taken its place
            serves(desk, *found)
    desk.close()
    left = [path.name for path in folder.rglob("*") if path.suffix == ".tmp"]
    assert left == []


def serves(desk: Desk, salt: bytes, tokens: list[int]) -> None:
    """The state that lies on disk is given, and it is the right one."""
    prompt = [*tokens, 7]
    reply = desk.ask(prompt, salt=salt)
    assert reply.reused == len(tokens)
    assert reply.tokens == Desk(FakeEngine()).ask(prompt).tokens
