"""What a turn computed is in the store when it leaves the engine's memory, whatever left before."""

from __future__ import annotations

from rekindle.tokens import Tokens
from tests.support.fake import FakeEngine
from tests.support.harness import RuntimeHarness

FIRST = [1] * 64  # eight blocks


def evict_from_store(harness: RuntimeHarness, tokens: list[int], start: int) -> None:
    """What a full tier does: leaves go first, down to the block that starts here."""
    blocks = harness.store.match(harness.namespace(), Tokens.of(tokens)).blocks
    for block in reversed(blocks):
        if block.start >= start:
            harness.store.drop(block)


def test_blocks_that_left_the_store_are_exported_again_when_the_sequence_leaves() -> None:
    harness = RuntimeHarness(FakeEngine())
    harness.ask(FIRST, max_tokens=1)
    harness.offload()
    evict_from_store(harness, FIRST, start=16)
    assert harness.kv.make_room(harness.capabilities.pool_tokens)
    again = harness.ask([*FIRST, 2], max_tokens=1)
    assert (again.reused, again.finished.cache.tier) == (64, "ram")


def test_an_export_whose_last_block_left_the_store_begins_again() -> None:
    harness = RuntimeHarness(FakeEngine())
    harness.ask(FIRST, max_tokens=1)
    for _ in range(4):
        harness.scheduler.step()
    evict_from_store(harness, FIRST, start=24)
    harness.offload()
    assert harness.kv.make_room(harness.capabilities.pool_tokens)
    assert harness.ask([*FIRST, 2], max_tokens=1).reused == 64


def test_an_export_that_never_fits_comes_to_an_end() -> None:
    harness = RuntimeHarness(FakeEngine(), ram_bytes=7200)  # three blocks
    harness.ask(FIRST, max_tokens=1)
    harness.offload()
    assert harness.kv.make_room(harness.capabilities.pool_tokens)
    assert harness.ask([*FIRST, 2], max_tokens=1).reused == 24
