"""A group of tenants reuses the prompts that the operator shares with it, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from rekindle.protocol import admin as ops
from rekindle.protocol.events import Cancelled
from rekindle.protocol.requests import Names, Prepare
from tests.stress.storage_harness import StorageHarness, load
from tests.support.fake import CELL_BYTES, FakeEngine
from tests.support.harness import RuntimeHarness

ANNA, BERT, CARL, ROOT = b"anna", b"bert", b"carl", b"root"
TEAM = ["team"]
SYSTEM = list(range(100, 180))


def shared_with_team(idle_tokens: int = 1 << 20) -> RuntimeHarness:
    harness = RuntimeHarness(FakeEngine(), idle_tokens=idle_tokens)
    prepare = Prepare(shared="team", pinned=True, project="agent")
    harness.ask(SYSTEM, salt=ROOT, prepare=prepare, max_tokens=1)
    return harness


@pytest.mark.parametrize("idle_tokens", [0, 1 << 20])
def test_only_members_of_the_group_reuse_a_prompt_that_is_shared_with_it(
    idle_tokens: int,
) -> None:
    """From the engine's memory, and from the store."""
    harness = shared_with_team(idle_tokens=idle_tokens)
    members = [harness.ask([*SYSTEM, 5], salt=salt, groups=TEAM) for salt in (ANNA, BERT)]
    assert [each.reused for each in members] == [len(SYSTEM)] * 2
    for at, groups in enumerate(([], ["other"], ["Team"], [""])):
        assert harness.ask([*SYSTEM, 5], salt=b"stranger%d" % at, groups=groups).reused == 0


def test_what_members_add_to_a_shared_prompt_stays_their_own() -> None:
    harness = shared_with_team()
    harness.ask([*SYSTEM, 1, 2, 3, 4, 5, 6, 7, 8, 9], salt=ANNA, groups=TEAM)
    other = harness.ask([*SYSTEM, 1, 2, 3, 4, 5, 6, 7, 8, 10], salt=BERT, groups=TEAM)
    assert other.reused == len(SYSTEM)


def test_members_never_reuse_each_others_prompts_that_nobody_shared() -> None:
    harness = shared_with_team()
    prompt = list(range(300, 380))
    harness.ask(prompt, salt=ANNA, groups=TEAM)
    assert harness.ask(prompt, salt=BERT, groups=TEAM).reused == 0


def test_a_tenant_that_leaves_the_group_keeps_only_its_own_state() -> None:
    harness = shared_with_team()
    harness.ask([*SYSTEM, 5], salt=ANNA, groups=TEAM)
    assert harness.ask([*SYSTEM, 6], salt=ANNA).reused >= len(SYSTEM)
    assert harness.ask([*SYSTEM, 6], salt=BERT).reused == 0


def test_members_look_up_the_shared_entry_by_its_name_and_others_do_not() -> None:
    harness = shared_with_team()
    shown = harness.administer(ops.ShowEntry("agent"), salt=ANNA, groups=TEAM)
    assert isinstance(shown, ops.EntryInfo)
    with pytest.raises(Exception, match="no such cache key"):
        harness.administer(ops.ShowEntry("agent"), salt=CARL)
    with pytest.raises(Exception, match="no such cache key"):
        harness.administer(ops.DeleteEntry("agent"), salt=ANNA, groups=TEAM)


def test_a_removed_tenant_leaves_nothing_in_any_tier_and_others_keep_theirs(
    tmp_path: Path,
) -> None:
    first = StorageHarness(FakeEngine(), load(tmp_path / "kv"))
    for salt in (ANNA, BERT):
        first.ask(SYSTEM, salt=salt, names=Names(session_id="talk"))
        first.ask([9, *SYSTEM], salt=salt, kv_bits=8)
    first.administer(ops.StoreDocument(key="resp_1", content=b"secret"), salt=ANNA)
    own = first.namespace(ANNA)
    removed = first.administer(ops.RemoveTenant(ANNA), salt=ROOT, admin=True)
    assert isinstance(removed, ops.Removed)
    assert removed.entries >= 3
    assert first.store.size_bytes(own) == 0
    assert not first.entries.index.of(own)
    assert not [each for each in first.kv.idle if each.namespace == own]
    assert first.ask(SYSTEM, salt=ANNA, reuse=False).reused == 0
    assert first.ask([*SYSTEM, 1], salt=BERT).reused >= len(SYSTEM)
    first.close()
    again = StorageHarness(FakeEngine(), load(tmp_path / "kv"))
    assert not again.entries.index.of(again.namespace(ANNA))
    assert again.store.size_bytes(again.namespace(ANNA)) == 0
    assert again.ask([*SYSTEM, 1], salt=ANNA).reused == 0
    assert again.ask([*SYSTEM, 2], salt=BERT).reused >= len(SYSTEM)
    again.close()


def test_a_tenant_stores_no_more_than_its_limit_and_others_are_untouched() -> None:
    harness = RuntimeHarness(FakeEngine(), idle_tokens=0)
    limit_bytes = 200 * CELL_BYTES
    harness.ask([1] * 80, salt=BERT)
    for at in range(10):
        harness.ask([10 + at] * 80, salt=ANNA, cache_bytes=limit_bytes)
        entries_bytes = harness.entries.retention.held_bytes[harness.namespace(ANNA)]
        own_bytes = harness.store.size_bytes(harness.namespace(ANNA))
        assert own_bytes + entries_bytes <= limit_bytes or not own_bytes
    assert harness.ask([1] * 81, salt=BERT).reused >= 72


def test_a_tenant_without_a_limit_gets_its_room_back() -> None:
    harness = RuntimeHarness(FakeEngine(), idle_tokens=0)
    harness.ask([1] * 80, salt=ANNA, cache_bytes=10)
    assert harness.store.size_bytes(harness.namespace(ANNA)) == 0
    harness.ask([1] * 80, salt=ANNA)
    assert harness.store.size_bytes(harness.namespace(ANNA)) > 0
    assert not any(isinstance(event, Cancelled) for event in harness.replies[1].events)
