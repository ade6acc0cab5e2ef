"""Names propose an entry, tokens decide what is reused, and the report says so."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from rekindle.chat.prompt import Prompt
from rekindle.errors import CacheKeyNotFound, NoRoomForPins, NotFound
from rekindle.protocol.admin import (
    DeleteEntry,
    Document,
    EntryInfo,
    EntryList,
    ExportState,
    Flush,
    GetDocument,
    GetStats,
    IndexPrompt,
    ListEntries,
    PinEntry,
    Removed,
    RemoveOld,
    RemoveSession,
    ShowEntry,
    Stats,
    StoreDocument,
    Validate,
    Validation,
)
from rekindle.protocol.requests import Names, Prepare
from rekindle.tokens import Tokens
from tests.support.clock import FakeClock
from tests.support.fake import FakeEngine
from tests.support.harness import Reply, RuntimeHarness

PROMPT = list(range(100, 140))


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def harness(clock: FakeClock) -> RuntimeHarness:
    return RuntimeHarness(FakeEngine(), clock=clock)


def key_of(reply: Reply) -> str:
    key = reply.finished.cache.new_cache_key
    assert key is not None
    return key


def going_on(reply: Reply, *more: int) -> list[int]:
    return [*reply.turn.tokens, *(more or (7, 8, 9))]


def test_a_returned_cache_key_hits_in_the_next_turn(harness: RuntimeHarness) -> None:
    first = harness.ask(PROMPT, names=Names(return_cache_key=True))
    report = harness.ask(going_on(first), names=Names(cache_key=key_of(first))).finished.cache
    assert (report.status, report.reason, report.cache_key) == ("hit", "full_match", key_of(first))
    assert report.new_cache_key is None
    assert report.reused_tokens == len(first.turn.tokens) - 1


def test_each_turn_gets_its_own_key_and_earlier_keys_stay_valid(
    harness: RuntimeHarness,
) -> None:
    naming = Names(return_cache_key=True)
    first = harness.ask(PROMPT, names=naming)
    second = harness.ask(going_on(first), names=naming)
    assert key_of(first) != key_of(second)
    branch = harness.ask(going_on(first, 1, 2), names=Names(cache_key=key_of(first)))
    assert branch.finished.cache.status == "hit"


def test_equal_conversations_share_one_entry_and_its_key(harness: RuntimeHarness) -> None:
    naming = Names(return_cache_key=True)
    assert key_of(harness.ask(PROMPT, names=naming)) == key_of(harness.ask(PROMPT, names=naming))


def test_all_names_of_a_conversation_lead_to_one_entry(harness: RuntimeHarness) -> None:
    naming = Names(
        session_id="s", session_number=7, prompt_cache_key="p", wants_message_id=True,
        return_cache_key=True,
    )  # fmt: skip
    first = harness.ask(PROMPT, names=naming)
    message = first.finished.message_id
    assert message is not None
    for sent in (
        Names(session_id="s"),
        Names(session_number=7),
        Names(prompt_cache_key="p"),
        Names(message_ids=["unknown", message]),
        Names(cache_key=key_of(first)),
    ):
        assert harness.ask(going_on(first), names=sent).finished.cache.cache_key == key_of(first)
        harness.ask(PROMPT, names=naming)  # names the first conversation again


def test_an_unknown_key_is_echoed_and_not_an_error(harness: RuntimeHarness) -> None:
    report = harness.ask(PROMPT, names=Names(cache_key="no such key")).finished.cache
    assert (report.status, report.reason) == ("miss", "cache_key_not_found")
    assert report.cache_key == "no such key"


def test_an_edited_history_reuses_only_the_tokens_before_the_edit(harness: RuntimeHarness) -> None:
    first = harness.ask(PROMPT, names=Names(session_id="s"))
    edited = [*PROMPT[:20], 999, *PROMPT[21:], *first.tokens, 7]
    reply = harness.ask(edited, names=Names(session_id="s"))
    assert reply.reused == 20
    assert reply.finished.cache.status == "partial_hit"
    assert reply.tokens == RuntimeHarness(FakeEngine()).ask(edited).tokens


def test_a_repeated_prompt_is_a_hit_with_and_without_its_key(harness: RuntimeHarness) -> None:
    first = harness.ask(PROMPT, names=Names(return_cache_key=True))
    for names in (Names(cache_key=key_of(first)), None):
        report = harness.ask(PROMPT, names=names).finished.cache
        assert (report.status, report.reason) == ("hit", "full_match")


def test_a_session_without_a_key_keeps_a_single_entry(
    harness: RuntimeHarness,
) -> None:
    tokens = PROMPT
    for _ in range(5):
        tokens = going_on(harness.ask(tokens, names=Names(session_id="s")))
    assert len(harness.entries) == 1


def test_a_tenant_cannot_use_the_names_of_another(harness: RuntimeHarness) -> None:
    naming = Names(session_id="s", return_cache_key=True, wants_message_id=True)
    first = harness.ask(PROMPT, names=naming)
    message = first.finished.message_id
    assert message is not None
    stolen = Names(cache_key=key_of(first), session_id="s", message_ids=[message])
    theirs = harness.ask(going_on(first), salt=b"other", names=stolen).finished.cache
    unknown = Names(cache_key="f" * 32, session_id="t", message_ids=["m"])
    strangers = harness.ask(going_on(first), salt=b"third", names=unknown).finished.cache
    assert (theirs.cache_key, strangers.cache_key) == (stolen.cache_key, unknown.cache_key)
    theirs.cache_key = strangers.cache_key = None
    assert theirs == strangers
    assert theirs.reused_tokens == 0


def test_a_key_expires_after_its_ttl_which_each_use_restarts(
    harness: RuntimeHarness, clock: FakeClock
) -> None:
    first = harness.ask(PROMPT, names=Names(return_cache_key=True))
    clock.pass_by(1700)
    again = Names(cache_key=key_of(first))
    assert harness.ask(going_on(first), names=again).finished.cache.status == "hit"
    clock.pass_by(1700)
    assert harness.ask(going_on(first), names=again).finished.cache.status == "hit"
    clock.pass_by(1801)
    report = harness.ask(going_on(first, 5), names=again).finished.cache
    assert (report.status, report.reason) == ("hit", "expired")


def test_collecting_expired_entries_frees_state_that_no_other_entry_uses(
    harness: RuntimeHarness, clock: FakeClock
) -> None:
    harness.kv.idle.default.max_tokens = 0
    first = harness.ask(PROMPT, names=Names(return_cache_key=True, ttl_s=10))
    harness.ask([*PROMPT[:16], 1, 2, 3], names=Names(session_id="keeps the first blocks"))
    clock.pass_by(11)
    removed, freed = harness.entries.collect()
    assert removed == 1
    assert freed == 16 * (len(first.turn.tokens) - 1 - 16)
    assert harness.ask(PROMPT).reused == 16


def test_a_jump_of_the_wall_clock_expires_nothing(
    clock: FakeClock, harness: RuntimeHarness
) -> None:
    first = harness.ask(PROMPT, names=Names(return_cache_key=True))
    clock.wall += 10**9
    assert harness.entries.collect() == (0, 0)
    clock.wall -= 2 * 10**9
    assert harness.entries.collect() == (0, 0)
    assert (
        harness.ask(going_on(first), names=Names(cache_key=key_of(first))).finished.cache.status
        == "hit"
    )


@pytest.mark.parametrize("jump_s", [-(10**9), 10**9])
def test_a_jump_of_the_wall_clock_during_a_restart_expires_nothing(
    tmp_path: Path, clock: FakeClock, jump_s: float
) -> None:
    harness = RuntimeHarness(FakeEngine(), clock=clock, folder=tmp_path)
    first = harness.ask(PROMPT, names=Names(return_cache_key=True))
    harness.close()
    clock.wall += jump_s
    clock.steady = 5.0
    again = RuntimeHarness(FakeEngine(), clock=clock, folder=tmp_path)
    assert again.entries.collect() == (0, 0)
    hit = again.ask(going_on(first), names=Names(cache_key=key_of(first)))
    assert hit.finished.cache.status == "hit"
    clock.pass_by(1801)
    assert again.entries.collect()[0] == 1
    again.close()


def test_a_prepared_prompt_is_computed_once_and_kept(harness: RuntimeHarness) -> None:
    engine = harness.engine
    assert isinstance(engine, FakeEngine)
    ready = harness.ask(PROMPT, prepare=Prepare())
    assert engine.counts.computed_tokens == len(PROMPT)
    assert ready.text == ""
    report = harness.ask([*PROMPT, 1, 2], names=Names(cache_key=key_of(ready))).finished.cache
    assert (report.status, report.reused_tokens) == ("hit", len(PROMPT))


def test_pinned_state_survives_eviction_and_a_pin_without_room_is_refused(
    clock: FakeClock,
) -> None:
    harness = RuntimeHarness(FakeEngine(), clock=clock, ram_bytes=20_000, idle_tokens=0)
    ready = harness.ask(PROMPT[:32], prepare=Prepare(pinned=True, ttl_s=None))
    for number in range(20):
        harness.ask([500 + number] * 40)
    clock.pass_by(10**6)
    harness.entries.collect()
    after = harness.ask([*PROMPT[:32], 1, 2], names=Names(cache_key=key_of(ready)))
    assert after.finished.cache.status == "hit"
    with pytest.raises(NoRoomForPins):
        harness.submit(list(range(500)), prepare=Prepare(pinned=True))


def test_only_shared_prompts_are_reused_by_other_tenants(
    harness: RuntimeHarness,
) -> None:
    harness.ask(PROMPT, prepare=Prepare(shared=True, pinned=True, ttl_s=None))
    one = harness.ask([*PROMPT, 1, 2, 3], salt=b"one")
    other = harness.ask([*PROMPT, 1, 2, 3], salt=b"other")
    assert one.reused == other.reused == len(PROMPT)


PROJECT = Prepare(shared=True, pinned=True, ttl_s=None, project="analyst")


@pytest.mark.parametrize("shared", [True, False])
def test_the_name_or_the_key_of_a_project_serves_as_a_cache_key(
    harness: RuntimeHarness, shared: bool
) -> None:
    prepared = harness.ask(PROMPT, prepare=replace(PROJECT, shared=shared))
    for name in ("analyst", key_of(prepared)):
        report = harness.ask([*PROMPT, 1, 2, 3], names=Names(cache_key=name)).finished.cache
        assert (report.status, report.reason) == ("hit", "full_match")
        assert report.reused_tokens >= len(PROMPT)
    listed = harness.administer(ListEntries(), admin=True)
    assert isinstance(listed, EntryList)
    [entry] = [each for each in listed.entries if each.cache_key == key_of(prepared)]
    assert [(each.kind, each.name) for each in entry.names] == [("project", "analyst")]


def test_the_name_of_a_project_stays_with_its_prompt(harness: RuntimeHarness) -> None:
    prepared = harness.ask(PROMPT, prepare=PROJECT)
    naming = Names(cache_key="analyst", session_id="analyst", return_cache_key=True)
    for salt in (b"one", b"other"):
        harness.ask([*PROMPT, 1, 2, 3], salt=salt, names=naming)
        report = harness.ask([*PROMPT, 4, 5], salt=salt, names=Names(cache_key="analyst"))
        assert report.finished.cache.reason == "full_match"
    changed = harness.ask([*PROMPT[:20], 7], prepare=PROJECT)
    found = harness.administer(ShowEntry("analyst"), salt=b"third")
    assert isinstance(found, EntryInfo)
    assert found.cache_key == key_of(changed), "the next start has another prompt"
    own = harness.administer(ShowEntry("analyst"), salt=b"one")
    assert isinstance(own, EntryInfo)
    assert own.cache_key not in (key_of(prepared), key_of(changed)), "its own session comes first"


def test_tenants_see_a_shared_project_but_neither_change_it_nor_see_who_uses_it(
    harness: RuntimeHarness, clock: FakeClock
) -> None:
    key = key_of(harness.ask(PROMPT, prepare=PROJECT))
    seen = harness.administer(ShowEntry("analyst"), salt=b"one")
    clock.pass_by(60)
    harness.ask([*PROMPT, 1, 2, 3], salt=b"other", names=Names(cache_key="analyst"))
    assert harness.administer(ShowEntry("analyst"), salt=b"one") == seen
    for name in ("analyst", key):
        for op in (DeleteEntry(name), PinEntry(name, pinned=False), ExportState(name, "/none")):
            with pytest.raises(CacheKeyNotFound):
                harness.administer(op, salt=b"one")
    used = harness.administer(ShowEntry("analyst"), admin=True)
    assert isinstance(used, EntryInfo)
    assert used.pinned
    assert used.last_used == used.created_at + 60
    assert isinstance(harness.administer(DeleteEntry("analyst"), admin=True), Removed)


def test_a_project_of_an_open_server_can_be_validated_by_name(harness: RuntimeHarness) -> None:
    harness.administer(Flush(key_of(harness.ask(PROMPT, prepare=PROJECT))), admin=True)
    asked = Validate(cache_key="analyst", messages=[{"role": "user", "content": "x"}])
    found = harness.administer(asked, prompt=Prompt(Tokens.of([*PROMPT, 1, 2])), salt=b"one")
    assert isinstance(found, Validation)
    assert (found.status, found.reusable_tokens) == ("hit", len(PROMPT))


def test_a_fingerprint_session_recognises_a_conversation_without_a_name(
    harness: RuntimeHarness,
) -> None:
    naming = Names(by_fingerprint=True)
    hello = [{"role": "user", "content": "Hello"}]
    first = harness.ask(PROMPT, names=naming, messages=hello)
    history = [*hello, {"role": "assistant", "content": first.turn.output.message.text}]
    more = [*history, {"role": "user", "content": "How are you?"}]
    second = harness.ask(going_on(first), names=naming, messages=more)
    assert second.finished.cache.status == "hit"
    harness.ask([1, 2, 3], names=naming, messages=[{"role": "user", "content": "Another"}])
    assert harness.logs == [
        "FingerprintManager: registered new session auto_session_0",
        "FingerprintManager: extended session auto_session_0 fingerprint with assistant response",
        "FingerprintManager: matched existing session auto_session_0",
        "FingerprintManager: extended session auto_session_0 fingerprint with assistant response",
        "FingerprintManager: registered new session auto_session_1",
        "FingerprintManager: extended session auto_session_1 fingerprint with assistant response",
    ]


def test_a_request_that_opts_out_is_not_stored(harness: RuntimeHarness) -> None:
    reply = harness.ask(PROMPT, reuse=False, names=Names(session_id="s", wants_message_id=True))
    assert reply.finished.message_id is not None
    assert reply.finished.cache.reason == "opted_out"
    assert len(harness.entries) == 0


# -- admin requests --


def test_a_tenant_lists_its_own_entries_and_an_admin_all(harness: RuntimeHarness) -> None:
    harness.ask(PROMPT, salt=b"one", names=Names(session_id="mine"))
    harness.ask(PROMPT, salt=b"two", names=Names(session_id="theirs"))
    own = harness.administer(ListEntries(), salt=b"one")
    everything = harness.administer(ListEntries(), admin=True)
    assert isinstance(own, EntryList)
    assert isinstance(everything, EntryList)
    assert [name.name for entry in own.entries for name in entry.names] == ["mine"]
    assert len(everything.entries) == 2


def test_deleting_frees_the_state_and_is_refused_to_other_tenants(harness: RuntimeHarness) -> None:
    first = harness.ask(PROMPT, names=Names(return_cache_key=True))
    delete = DeleteEntry(key_of(first))
    with pytest.raises(CacheKeyNotFound):
        harness.administer(delete, salt=b"stranger")
    harness.offload()
    assert harness.administer(delete) == Removed(1, 16 * (len(first.turn.tokens) - 1))
    assert harness.ask(PROMPT).reused == 0
    with pytest.raises(CacheKeyNotFound):
        harness.administer(delete)


def test_removing_a_conversation_frees_the_state_of_its_discarded_branches(
    harness: RuntimeHarness,
) -> None:
    """No name leads to a regenerated reply or to tokens that a client never saw."""
    harness.kv.idle.default.max_tokens = 0
    for branch in (1, 2, 3):
        harness.ask([*PROMPT, branch, branch, branch], names=Names(session_id="s"))
    removed = harness.administer(RemoveSession("s"))
    assert isinstance(removed, Removed)
    assert removed.entries == 1
    assert len(harness.store) == harness.store.tiers[0].budget.used_bytes == 0
    assert harness.ask(PROMPT).reused == 0


def test_removing_a_conversation_keeps_blocks_that_another_one_uses(
    harness: RuntimeHarness,
) -> None:
    harness.kv.idle.default.max_tokens = 0
    harness.ask([*PROMPT, 1], names=Names(session_id="one"))
    other = harness.ask([*PROMPT, 2], names=Names(session_id="two"))
    harness.administer(RemoveSession("one"))
    assert (
        harness.ask(going_on(other), names=Names(session_id="two")).finished.cache.status == "hit"
    )


def test_an_expired_entry_is_invisible_before_it_is_collected(
    harness: RuntimeHarness, clock: FakeClock
) -> None:
    first = harness.ask(PROMPT, names=Names(return_cache_key=True, ttl_s=10))
    clock.pass_by(11)
    for admin in (False, True):
        listed = harness.administer(ListEntries(), admin=admin)
        assert listed == EntryList([])
        with pytest.raises(CacheKeyNotFound):
            harness.administer(PinEntry(key_of(first), True), admin=admin)


def test_flushing_an_entry_that_has_just_expired_is_answered(
    harness: RuntimeHarness, clock: FakeClock
) -> None:
    ready = harness.ask(PROMPT, prepare=Prepare(ttl_s=0.001))
    clock.pass_by(1)
    assert isinstance(harness.administer(Flush(key_of(ready))), EntryInfo)


def test_an_entry_that_was_never_computed_is_not_reported_as_evicted(
    harness: RuntimeHarness,
) -> None:
    message = {"role": "system", "content": "x"}
    noted = IndexPrompt(messages=[message], prepare=Prepare())
    entry = harness.administer(noted, prompt=Prompt(Tokens.of(PROMPT)))
    assert isinstance(entry, EntryInfo)
    assert (entry.tier, entry.size_bytes) == (None, 0)
    report = harness.ask([*PROMPT, 1], names=Names(cache_key=entry.cache_key)).finished.cache
    assert (report.status, report.reason) == ("miss", "not_cached")
    again = harness.ask([*PROMPT, 1], names=Names(cache_key=entry.cache_key)).finished.cache
    assert again.status == "hit"


def test_only_sessions_older_than_the_limit_are_removed(
    harness: RuntimeHarness, clock: FakeClock
) -> None:
    harness.ask(PROMPT, names=Names(session_number=1))
    clock.pass_by(100)
    harness.ask([1, 2, 3], names=Names(session_number=2))
    removed = harness.administer(RemoveOld(50))
    assert isinstance(removed, Removed)
    assert removed.entries == 1
    assert harness.entries.by_name(harness.namespace(), ("kv_cache_session_id", "2")) is not None


def test_removing_old_sessions_leaves_what_is_not_a_session(
    harness: RuntimeHarness, clock: FakeClock
) -> None:
    prepared = harness.ask(PROMPT, prepare=Prepare(ttl_s=None))
    response = harness.ask([1, 2, 3], names=Names(entry_key="resp_1", prompt_cache_key="p"))
    harness.ask([4, 5, 6])
    harness.ask([7, 8, 9], names=Names(session_id="s"))
    harness.ask([10, 11, 12], names=Names(wants_message_id=True))
    clock.pass_by(100)
    removed = harness.administer(RemoveOld(50))
    assert isinstance(removed, Removed)
    assert removed.entries == 2
    assert harness.entries.by_key(harness.namespace(), key_of(prepared)) is not None
    assert harness.entries.by_key(harness.namespace(), "resp_1") is not None
    assert len(harness.entries.of(None)) == 3
    assert response.finished


def test_a_stored_response_in_a_conversation_is_not_a_session(harness: RuntimeHarness) -> None:
    """Its state is named after the conversation, but its own API lists and deletes it."""
    harness.ask(PROMPT, names=Names(entry_key="resp_1", session_id="conv_1"))
    harness.administer(StoreDocument(key="resp_1", content=b"kept"))
    removed = harness.administer(RemoveOld(-1))
    assert isinstance(removed, Removed)
    assert removed.entries == 0
    with pytest.raises(NotFound):
        harness.administer(RemoveSession("conv_1"))
    assert harness.administer(GetDocument("resp_1")) == Document("resp_1", b"kept")
    listed = harness.administer(ListEntries())
    assert isinstance(listed, EntryList)
    assert [each.has_document for each in listed.entries] == [True]


def test_stats_count_a_tenants_turns_and_the_bytes_saved_by_sharing(
    harness: RuntimeHarness,
) -> None:
    harness.kv.idle.default.max_tokens = 0
    for token in range(10):
        harness.ask([*PROMPT, token], names=Names(session_id=str(token)))
    harness.ask(PROMPT, salt=b"other")
    stats = harness.administer(GetStats())
    assert isinstance(stats, Stats)
    assert (stats.entries, stats.hits + stats.partial_hits, stats.misses) == (10, 9, 1)
    assert stats.logical_bytes > 3 * stats.unique_bytes > 0
    assert stats.ram_limit_bytes == 0
