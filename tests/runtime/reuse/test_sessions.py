"""Names propose, tokens decide, and the report says what came of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rekindle.chat.prompt import Prompt
from rekindle.errors import CacheKeyNotFound, NoRoomForPins
from rekindle.protocol.admin import (
    DeleteEntry,
    EntryInfo,
    EntryList,
    Flush,
    GetStats,
    IndexPrompt,
    ListEntries,
    PinEntry,
    Removed,
    RemoveOld,
    RemoveSession,
    Stats,
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


def test_a_key_is_returned_when_asked_for_and_hits_the_next_time(harness: RuntimeHarness) -> None:
    first = harness.ask(PROMPT, names=Names(return_cache_key=True))
    report = harness.ask(going_on(first), names=Names(cache_key=key_of(first))).finished.cache
    assert (report.status, report.reason, report.cache_key) == ("hit", "full_match", key_of(first))
    assert report.new_cache_key is None
    assert report.reused_tokens == len(first.turn.tokens) - 1


def test_every_turn_of_a_chain_has_a_key_of_its_own_and_the_old_ones_stay(
    harness: RuntimeHarness,
) -> None:
    naming = Names(return_cache_key=True)
    first = harness.ask(PROMPT, names=naming)
    second = harness.ask(going_on(first), names=naming)
    assert key_of(first) != key_of(second)
    branch = harness.ask(going_on(first, 1, 2), names=Names(cache_key=key_of(first)))
    assert branch.finished.cache.status == "hit"


def test_the_same_head_is_the_same_entry_and_keeps_its_key(harness: RuntimeHarness) -> None:
    naming = Names(return_cache_key=True)
    assert key_of(harness.ask(PROMPT, names=naming)) == key_of(harness.ask(PROMPT, names=naming))


def test_all_names_of_one_head_lead_to_one_entry(harness: RuntimeHarness) -> None:
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
        harness.ask(PROMPT, names=naming)  # the names come back to the first head


def test_an_unknown_key_is_a_miss_that_says_so_and_never_an_error(harness: RuntimeHarness) -> None:
    report = harness.ask(PROMPT, names=Names(cache_key="no such key")).finished.cache
    assert (report.status, report.reason) == ("miss", "cache_key_not_found")
    assert report.cache_key is None


def test_an_edited_history_is_compared_and_not_trusted(harness: RuntimeHarness) -> None:
    first = harness.ask(PROMPT, names=Names(session_id="s"))
    edited = [*PROMPT[:20], 999, *PROMPT[21:], *first.tokens, 7]
    reply = harness.ask(edited, names=Names(session_id="s"))
    assert reply.reused == 20
    assert reply.finished.cache.status == "partial_hit"
    assert reply.tokens == RuntimeHarness(FakeEngine()).ask(edited).tokens


def test_a_request_that_is_shorter_than_its_entry_says_so(harness: RuntimeHarness) -> None:
    first = harness.ask(PROMPT, names=Names(return_cache_key=True))
    report = harness.ask(PROMPT, names=Names(cache_key=key_of(first))).finished.cache
    assert (report.status, report.reason) == ("partial_hit", "request_shorter")


def test_a_session_without_a_key_has_one_entry_however_long_it_gets(
    harness: RuntimeHarness,
) -> None:
    tokens = PROMPT
    for _ in range(5):
        tokens = going_on(harness.ask(tokens, names=Names(session_id="s")))
    assert len(harness.entries) == 1


def test_another_tenant_knows_none_of_the_names(harness: RuntimeHarness) -> None:
    naming = Names(session_id="s", return_cache_key=True, wants_message_id=True)
    first = harness.ask(PROMPT, names=naming)
    message = first.finished.message_id
    assert message is not None
    stolen = Names(cache_key=key_of(first), session_id="s", message_ids=[message])
    theirs = harness.ask(going_on(first), salt=b"other", names=stolen).finished.cache
    unknown = Names(cache_key="f" * 32, session_id="t", message_ids=["m"])
    strangers = harness.ask(going_on(first), salt=b"third", names=unknown).finished.cache
    assert theirs == strangers
    assert theirs.reused_tokens == 0


def test_a_key_expires_after_its_time_and_a_use_begins_it_again(
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
    assert (report.status, report.reason) == ("miss", "expired")


def test_collecting_frees_the_state_that_is_no_other_entrys(
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


def test_a_clock_that_jumps_wipes_nothing(clock: FakeClock, harness: RuntimeHarness) -> None:
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
def test_a_clock_that_jumped_while_the_server_was_down_wipes_nothing(
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


def test_preparing_computes_the_prompt_once_and_keeps_it(harness: RuntimeHarness) -> None:
    engine = harness.engine
    assert isinstance(engine, FakeEngine)
    ready = harness.ask(PROMPT, prepare=Prepare())
    assert engine.counts.computed_tokens == len(PROMPT)
    assert ready.text == ""
    report = harness.ask([*PROMPT, 1, 2], names=Names(cache_key=key_of(ready))).finished.cache
    assert (report.status, report.reused_tokens) == ("hit", len(PROMPT))


def test_what_is_pinned_outlives_any_pressure_and_the_next_pin_is_refused(
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


def test_shared_prompts_are_common_to_all_tenants_and_nothing_else_is(
    harness: RuntimeHarness,
) -> None:
    harness.ask(PROMPT, prepare=Prepare(shared=True, pinned=True, ttl_s=None))
    one = harness.ask([*PROMPT, 1, 2, 3], salt=b"one")
    other = harness.ask([*PROMPT, 1, 2, 3], salt=b"other")
    assert one.reused == other.reused == len(PROMPT)


def test_fingerprints_recognise_a_conversation_that_has_no_name(harness: RuntimeHarness) -> None:
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


def test_a_request_that_opts_out_is_not_remembered(harness: RuntimeHarness) -> None:
    reply = harness.ask(PROMPT, reuse=False, names=Names(session_id="s", wants_message_id=True))
    assert reply.finished.message_id is not None
    assert reply.finished.cache.reason == "opted_out"
    assert len(harness.entries) == 0


# -- questions -----------------------------------------------------------------------------------


def test_the_list_shows_a_tenants_own_entries_and_an_admin_all(harness: RuntimeHarness) -> None:
    harness.ask(PROMPT, salt=b"one", names=Names(session_id="mine"))
    harness.ask(PROMPT, salt=b"two", names=Names(session_id="theirs"))
    own = harness.administer(ListEntries(), salt=b"one")
    everything = harness.administer(ListEntries(), admin=True)
    assert isinstance(own, EntryList)
    assert isinstance(everything, EntryList)
    assert [name.name for entry in own.entries for name in entry.names] == ["mine"]
    assert len(everything.entries) == 2


def test_deleting_takes_the_state_too_and_is_refused_to_strangers(harness: RuntimeHarness) -> None:
    first = harness.ask(PROMPT, names=Names(return_cache_key=True))
    delete = DeleteEntry(key_of(first))
    with pytest.raises(CacheKeyNotFound):
        harness.administer(delete, salt=b"stranger")
    harness.offload()
    assert harness.administer(delete) == Removed(1, 16 * (len(first.turn.tokens) - 1))
    assert harness.ask(PROMPT).reused == 0
    with pytest.raises(CacheKeyNotFound):
        harness.administer(delete)


def test_removing_a_conversation_takes_what_it_left_behind_on_its_way(
    harness: RuntimeHarness,
) -> None:
    """A reply that was made again, tokens that the client never saw: nobody could delete them."""
    harness.kv.idle.default.max_tokens = 0
    for branch in (1, 2, 3):
        harness.ask([*PROMPT, branch, branch, branch], names=Names(session_id="s"))
    removed = harness.administer(RemoveSession("s"))
    assert isinstance(removed, Removed)
    assert removed.entries == 1
    assert len(harness.store) == harness.store.tiers[0].budget.used_bytes == 0
    assert harness.ask(PROMPT).reused == 0


def test_removing_a_conversation_leaves_what_another_stands_on(harness: RuntimeHarness) -> None:
    harness.kv.idle.default.max_tokens = 0
    harness.ask([*PROMPT, 1], names=Names(session_id="one"))
    other = harness.ask([*PROMPT, 2], names=Names(session_id="two"))
    harness.administer(RemoveSession("one"))
    assert (
        harness.ask(going_on(other), names=Names(session_id="two")).finished.cache.status == "hit"
    )


def test_what_has_expired_is_gone_for_everybody_before_it_is_collected(
    harness: RuntimeHarness, clock: FakeClock
) -> None:
    first = harness.ask(PROMPT, names=Names(return_cache_key=True, ttl_s=10))
    clock.pass_by(11)
    for admin in (False, True):
        listed = harness.administer(ListEntries(), admin=admin)
        assert listed == EntryList([])
        with pytest.raises(CacheKeyNotFound):
            harness.administer(PinEntry(key_of(first), True), admin=admin)


def test_settling_an_entry_that_expired_meanwhile_still_answers(
    harness: RuntimeHarness, clock: FakeClock
) -> None:
    ready = harness.ask(PROMPT, prepare=Prepare(ttl_s=0.001))
    clock.pass_by(1)
    assert isinstance(harness.administer(Flush(key_of(ready))), EntryInfo)


def test_an_entry_that_was_only_noted_is_not_called_evicted(harness: RuntimeHarness) -> None:
    message = {"role": "system", "content": "x"}
    noted = IndexPrompt(messages=[message], prepare=Prepare())
    entry = harness.administer(noted, prompt=Prompt(Tokens.of(PROMPT)))
    assert isinstance(entry, EntryInfo)
    assert (entry.tier, entry.size_bytes) == (None, 0)
    report = harness.ask([*PROMPT, 1], names=Names(cache_key=entry.cache_key)).finished.cache
    assert (report.status, report.reason) == ("miss", "not_cached")
    again = harness.ask([*PROMPT, 1], names=Names(cache_key=entry.cache_key)).finished.cache
    assert again.status == "hit"


def test_old_sessions_are_removed_and_younger_ones_stay(
    harness: RuntimeHarness, clock: FakeClock
) -> None:
    harness.ask(PROMPT, names=Names(session_number=1))
    clock.pass_by(100)
    harness.ask([1, 2, 3], names=Names(session_number=2))
    removed = harness.administer(RemoveOld(50))
    assert isinstance(removed, Removed)
    assert removed.entries == 1
    assert harness.entries.by_name(harness.namespace(), ("kv_cache_session_id", "2")) is not None


def test_stats_count_what_a_tenant_did_and_what_sharing_saves(harness: RuntimeHarness) -> None:
    harness.kv.idle.default.max_tokens = 0
    for token in range(10):
        harness.ask([*PROMPT, token], names=Names(session_id=str(token)))
    harness.ask(PROMPT, salt=b"other")
    stats = harness.administer(GetStats())
    assert isinstance(stats, Stats)
    assert (stats.entries, stats.hits + stats.partial_hits, stats.misses) == (10, 9, 1)
    assert stats.logical_bytes > 3 * stats.unique_bytes > 0
    assert stats.ram_limit_bytes == 0
