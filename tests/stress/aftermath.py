"""Checks a cache folder after a process that used it was killed."""

from __future__ import annotations

import random
from pathlib import Path

from rekindle.kvcache.disk.check import check
from rekindle.kvcache.disk.folder import open_folder
from tests.stress.diary import Diary, Promises, WitnessedHarness, document_of, items_of
from tests.support.fake import FakeEngine
from tests.support.harness import RuntimeHarness

PLENTY_BYTES = 1 << 30
SAMPLES = 4


def index_agrees_with_files(folder: Path) -> None:
    """Opening the folder may repair it. Afterwards there is nothing left to repair."""
    opened = open_folder(folder, identity(), limit_bytes=PLENTY_BYTES)
    assert not opened.recovery.rebuilt, "a kill damages no index"
    assert not opened.recovery.quarantined, "a kill tears no file"
    opened.close()
    for report in check(folder, repair=False):
        assert report.findings == (), report.findings


def identity() -> bytes:
    """The identity of the model that a harness works for."""
    capabilities = FakeEngine().capabilities
    return capabilities.kv_layout.fingerprint + b"%d" % capabilities.block_tokens


def promises_are_kept(
    folder: Path, diary: Diary, chance: random.Random, *, disk_bytes: int = PLENTY_BYTES
) -> None:
    """Everything promised in the diary is on disk, and a sample of it is served."""
    harness = WitnessedHarness(FakeEngine(), diary=diary, folder=folder, disk_bytes=disk_bytes)
    promises = diary.read()  # opening with a smaller budget may evict blocks
    assert promises.blocks.keys() <= {block.key.hex() for block in harness.store if block.stored}
    documents_are_whole(harness, promises)
    known = {entry.key: entry.pinned for entry in harness.entries.of(None)}
    assert promises.entries <= known.keys()
    assert all(known[key] for key in promises.pinned)
    assert not any(known.get(key) for key in promises.unpinned)
    assert promises.deleted.isdisjoint(known)
    assert promises.gone.isdisjoint(block.key.hex() for block in harness.store)
    for key in chance.sample(sorted(promises.blocks), min(SAMPLES, len(promises.blocks))):
        if found := diary.read().blocks.get(key):  # an earlier answer may have evicted it
            whole = is_served(harness, *found)
            assert (
                whole or key not in diary.read().blocks
            )  # or an entry that was kept in the meantime
    harness.close()
    left = [path.name for path in folder.rglob("*") if path.suffix == ".tmp"]
    assert left == []


def documents_are_whole(harness: RuntimeHarness, promises: Promises) -> None:
    """Every promised document is there, and no document is older, torn or of another key."""
    found = {entry.key: entry.document for entry in harness.entries.of(None) if entry.document}
    for key, document in found.items():
        assert document == document_of(key, items_of(document)), f"{key} is torn"
    for key, items in promises.documents.items():
        assert key in found, f"{key} is lost"
        assert items_of(found[key]) in items, f"{key} is an older one"


def is_served(harness: RuntimeHarness, salt: bytes, tokens: list[int]) -> bool:
    """Whether all state on disk is reused. The answer has to be right in any case."""
    prompt = [*tokens, 7]
    reply = harness.ask(prompt, salt=salt)
    assert reply.tokens == RuntimeHarness(FakeEngine()).ask(prompt).tokens
    return reply.reused == len(tokens)
