"""A tenant that sends another tenant's prompt touches none of that tenant's state, in any tier.

In each test the first tenant asks again at the end: its state is there, and it is reused.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from rekindle.engine.base import Sequence
from rekindle.kvcache.block import Block
from rekindle.kvcache.disk.files import SYSTEM, Calls
from rekindle.kvcache.tiers.base import Fetch
from rekindle.protocol.requests import Names
from tests.stress.storage_harness import StorageHarness, load
from tests.support.fake import FakeEngine, FakeSequences
from tests.support.harness import RuntimeHarness
from tests.support.memory_tier import MemoryTier

ANNA, BERT = b"anna", b"bert"
PROMPT = list(range(100, 180))


@dataclass
class OpenedFiles:
    """Records the names of all files that are opened, for reading or writing."""

    names: list[str] = field(default_factory=list)

    def calls(self) -> Calls:
        return replace(SYSTEM, open=self._open)

    def _open(self, name: str, *args: Any, **options: Any) -> int:
        self.names.append(name)
        return SYSTEM.open(name, *args, **options)

    @contextmanager
    def during(self) -> Iterator[set[str]]:
        """The names of the files that are opened within the block."""
        opened: set[str] = set()
        start = len(self.names)
        yield opened
        opened |= set(self.names[start:])


class SharingSequences(FakeSequences):
    """Records the lengths of all parked sequences that a turn was given."""

    def __init__(self, engine: FakeEngine) -> None:
        super().__init__(engine)
        self.unparked_tokens: list[int] = []

    def share(self, source: Sequence, tokens: int, into: Sequence) -> None:
        if source.is_parked:
            self.unparked_tokens.append(source.length)
        super().share(source, tokens, into)


def test_a_file_of_another_tenant_is_never_opened(tmp_path: Path) -> None:
    """The second process has nothing in memory, so all state that it reuses comes from files."""
    first = StorageHarness(FakeEngine(), load(tmp_path / "kv"))
    told = first.ask(PROMPT, salt=ANNA, names=Names(session_id="talk", return_cache_key=True))
    first.close()
    files = OpenedFiles()
    again = StorageHarness(FakeEngine(), load(tmp_path / "kv"), files.calls())
    owned = {block.key.hex() for block in again.store if block.namespace == again.namespace(ANNA)}
    assert owned
    names = Names(session_id="talk", cache_key=told.finished.cache.new_cache_key)
    with files.during() as opened:
        assert again.ask([*told.turn.tokens, 7], salt=BERT, names=names).reused == 0
        assert again.ask(PROMPT, salt=b"", names=names).reused == 0
        again.flush()
    assert opened, "the state of the others was stored as well"
    assert not owned & opened
    with files.during() as opened:
        reply = again.ask([*told.turn.tokens, 7], salt=ANNA, names=names)
    assert reply.reused == len(told.turn.tokens) - 1
    assert reply.finished.cache.tier == "disk"
    assert owned <= opened
    again.close()


def test_a_tier_below_the_disk_is_not_asked_for_another_tenants_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shelf: dict[bytes, bytes] = {}
    first = RuntimeHarness(FakeEngine(), shelf=shelf, idle_tokens=0)
    first.ask(PROMPT, salt=ANNA)
    first.close()
    asked: list[bytes] = []
    read = MemoryTier.read

    def recorded(tier: MemoryTier, blocks: Seq[Block], fetch: Fetch) -> None:
        asked.extend(block.key for block in blocks)
        read(tier, blocks, fetch)

    monkeypatch.setattr(MemoryTier, "read", recorded)
    again = RuntimeHarness(FakeEngine(), shelf=shelf)
    assert again.ask(PROMPT, salt=BERT).reused == 0
    assert not asked
    assert again.ask(PROMPT, salt=ANNA).reused == len(PROMPT) - 1
    assert asked


def test_the_parked_state_of_another_tenant_is_never_restored() -> None:
    engine = FakeEngine(device="gpu", park_tokens=1000)
    engine.sequences = sequences = SharingSequences(engine)
    harness = RuntimeHarness(engine)
    told = harness.ask(PROMPT, salt=ANNA)
    harness.ask([3] * 40, salt=b"other", max_tokens=4)  # parks her conversation
    assert sequences.parking is not None
    parked_tokens = sequences.parking.used_tokens
    assert parked_tokens == len(told.turn.tokens) - 1
    computed = engine.counts.computed_tokens
    his = harness.ask(PROMPT, salt=BERT)
    assert his.reused == 0
    assert engine.counts.computed_tokens == computed + len(his.turn.tokens) - 1
    assert sequences.unparked_tokens == []
    assert engine.counts.restored_tokens == 0
    hers = harness.ask([*told.turn.tokens, 7], salt=ANNA)
    assert (hers.reused, hers.finished.cache.tier) == (parked_tokens, "device")
    assert sequences.unparked_tokens == [parked_tokens]
