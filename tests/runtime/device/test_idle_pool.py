"""Finished sequences in the engine's memory: what makes them leave it, and at whose cost."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import pytest

from rekindle.engine.base import Work
from rekindle.kvcache.block import PrefixHandle
from rekindle.protocol.admin import EntryInfo, Flush
from rekindle.protocol.requests import Names
from rekindle.runtime.device import idle_pool
from rekindle.runtime.device.offload import ALONE_FACTOR
from rekindle.tokens import Tokens
from tests.support.fake import CELL_BYTES, FakeEngine, FakePending
from tests.support.harness import RuntimeHarness

BLOCK_BYTES = 8 * CELL_BYTES


def key_of(harness: RuntimeHarness, tokens: list[int]) -> str:
    """The key of a conversation that stays in the engine's memory."""
    reply = harness.ask(tokens, max_tokens=1, names=Names(return_cache_key=True))
    assert reply.finished.cache.new_cache_key is not None
    return reply.finished.cache.new_cache_key


def test_a_flush_exports_the_entry_that_it_is_about_and_no_other() -> None:
    engine = FakeEngine()
    harness = RuntimeHarness(engine)
    keys = [key_of(harness, [number] * 41) for number in range(3)]
    info = harness.administer(Flush(keys[1]))
    assert isinstance(info, EntryInfo)
    assert info.held_tokens == 41
    assert engine.counts.exported_tokens == 41


def test_a_flush_is_answered_though_it_takes_many_steps() -> None:
    engine = FakeEngine()
    harness = RuntimeHarness(engine)
    key = key_of(harness, [1] * 400)
    harness.kv.budget.step_bytes = BLOCK_BYTES
    info = harness.administer(Flush(key))
    assert isinstance(info, EntryInfo)
    assert info.held_tokens == engine.counts.exported_tokens == 400


def test_nothing_is_evicted_for_a_turn_that_finds_no_room_anyway() -> None:
    engine = FakeEngine(pool_tokens=400)
    harness = RuntimeHarness(engine)
    harness.ask([1] * 80, max_tokens=1)
    running = harness.submit([2] * 200, max_tokens=40)
    while not running.tokens:
        harness.scheduler.step()
    waiting = harness.submit([3] * 190, max_tokens=1)
    harness.scheduler.step()
    assert not waiting.started  # it needs more than the resident's 80
    assert engine.counts.exported_tokens == 0
    harness.cancel(waiting)
    assert harness.ask([1] * 80, max_tokens=1).finished.cache.tier == "device"


def test_a_reply_goes_on_while_a_long_conversation_is_exported() -> None:
    engine = FakeEngine(context_tokens=2048, pool_tokens=8192)
    harness = RuntimeHarness(engine, idle_tokens=0)
    harness.kv.budget.step_bytes = 4 * BLOCK_BYTES
    talker = harness.submit([2, 3, 4], max_tokens=100)
    long = harness.submit([1] * 800, max_tokens=1)
    harness.run(long)
    for _ in range(20):
        exported, said = engine.counts.exported_tokens, len(talker.tokens)
        harness.scheduler.step()
        assert engine.counts.exported_tokens - exported == 4 * 8
        assert len(talker.tokens) == said + 1
    harness.run(talker)
    harness.offload()
    assert engine.open_sequences == 0
    assert harness.ask([1] * 801, max_tokens=1).reused == 800


def test_a_turn_waits_for_room_that_takes_many_steps_to_make() -> None:
    engine = FakeEngine(pool_tokens=512)
    harness = RuntimeHarness(engine)
    harness.ask([1] * 400, max_tokens=1)
    harness.kv.budget.step_bytes = BLOCK_BYTES
    reply = harness.submit([2] * 300, max_tokens=1)
    harness.scheduler.step()
    assert not reply.started
    assert engine.counts.exported_tokens == ALONE_FACTOR * 8
    harness.run(reply)
    assert harness.ask([1] * 401, max_tokens=1).reused == 400


def test_a_sequence_is_of_use_while_it_is_exported() -> None:
    engine = FakeEngine()
    harness = RuntimeHarness(engine, idle_tokens=0)
    harness.kv.budget.step_bytes = BLOCK_BYTES
    harness.ask([1] * 400, max_tokens=1)
    again = harness.ask([*[1] * 400, 2], max_tokens=1)
    assert (again.reused, again.finished.cache.tier) == (400, "device")


# -- on a CPU, where idle state costs those who compute ------------------------------------------

CONVERSATION = [1] * 80


def test_a_conversation_that_goes_on_alone_finds_its_state_in_place_and_in_the_store() -> None:
    engine = FakeEngine()
    harness = RuntimeHarness(engine, idle_tokens=None)
    history = list(CONVERSATION)
    for _ in range(3):
        reply = harness.ask(history, max_tokens=4)
        assert engine.counts.restored_tokens == 0
        stored = harness.store.match(harness.namespace(), Tokens.of(history)).tokens
        assert stored == len(history), "it is in RAM as soon as the turn has ended"
        history += [*reply.tokens, 5]
    assert reply.finished.cache.tier == "device"
    assert engine.open_sequences == 1


def test_a_turn_goes_on_in_the_sequence_itself_that_nobody_else_needs() -> None:
    engine = FakeEngine()
    harness = RuntimeHarness(engine)
    first = harness.ask([1] * 80, max_tokens=3)
    [idle] = harness.kv.idle
    asked = [1] * 80 + first.tokens + [2, 3]
    reply = harness.submit(asked, max_tokens=3)
    harness.scheduler.step()
    assert reply.turn.sequence is idle.sequence
    assert not list(harness.kv.idle)
    harness.run(reply)
    assert reply.reused == 82  # the last token of a reply is not computed
    assert reply.tokens == RuntimeHarness(FakeEngine()).ask(asked, max_tokens=3).tokens
    assert engine.open_sequences == 1


def test_a_turn_that_branches_off_leaves_the_sequence_to_others() -> None:
    harness = RuntimeHarness(FakeEngine())
    harness.ask([1] * 80, max_tokens=3)
    [idle] = harness.kv.idle
    reply = harness.submit([1] * 60 + [2], max_tokens=3)
    harness.scheduler.step()
    assert reply.turn.sequence is not idle.sequence
    assert [each.sequence for each in harness.kv.idle] == [idle.sequence]


def test_a_turn_that_computes_much_beside_it_sends_it_down_first() -> None:
    engine = FakeEngine()
    harness = RuntimeHarness(engine, idle_tokens=None)
    first = harness.ask(CONVERSATION, max_tokens=4)
    other = harness.submit([2] * 60, max_tokens=30)
    harness.scheduler.step()
    assert engine.pool_tokens - engine.sequences.free_tokens() <= 60
    again = harness.ask([*CONVERSATION, *first.tokens, 5], max_tokens=1)
    assert (again.reused, again.finished.cache.tier) == (83, "ram")
    harness.run(other)


def test_a_few_rows_beside_it_leave_it_where_it_is() -> None:
    engine = FakeEngine()
    harness = RuntimeHarness(engine, idle_tokens=None)
    first = harness.ask(CONVERSATION, max_tokens=4)
    harness.ask([2, 3, 4], max_tokens=3)
    again = harness.ask([*CONVERSATION, *first.tokens, 5], max_tokens=1)
    assert again.finished.cache.tier == "device"


def test_rows_beside_it_add_up_until_it_leaves() -> None:
    engine = FakeEngine()
    harness = RuntimeHarness(engine, idle_tokens=None)
    talker = harness.submit([2, 3, 4], max_tokens=100)
    while not talker.tokens:
        harness.scheduler.step()
    harness.run(harness.submit(CONVERSATION, max_tokens=1))
    steps = 0
    while engine.open_sequences == 2:
        harness.scheduler.step()
        steps += 1
    assert 4 <= steps <= 12
    harness.run(talker)


def test_exact_turns_compute_elsewhere_and_send_nothing_down() -> None:
    engine = FakeEngine()
    harness = RuntimeHarness(engine, idle_tokens=None)
    first = harness.ask(CONVERSATION, max_tokens=4)
    harness.ask([2] * 100, max_tokens=30, exact=True)
    again = harness.ask([*CONVERSATION, *first.tokens, 5], max_tokens=1)
    assert again.finished.cache.tier == "device"


def test_on_a_gpu_idle_state_stays_until_room_is_needed() -> None:
    engine = FakeEngine(device="gpu")
    harness = RuntimeHarness(engine, idle_tokens=None)
    first = harness.ask(CONVERSATION, max_tokens=4)
    harness.ask([2] * 100, max_tokens=30)
    again = harness.ask([*CONVERSATION, *first.tokens, 5], max_tokens=1)
    assert again.finished.cache.tier == "device"


# -- where the engine can park -----------------------------------------------------------------


def parking_harness(
    *, pool_tokens: int = 1024, park_tokens: int = 1000
) -> tuple[FakeEngine, RuntimeHarness]:
    engine = FakeEngine(device="gpu", pool_tokens=pool_tokens, park_tokens=park_tokens)
    return engine, RuntimeHarness(engine)


def test_a_sequence_that_nobody_runs_beside_stays_in_the_pool() -> None:
    engine, harness = parking_harness()
    harness.ask([1] * 80, max_tokens=1)
    assert engine.sequences.parking
    assert engine.sequences.parking.used_tokens == 0
    assert harness.ask([1] * 81, max_tokens=1).finished.cache.tier == "device"
    assert engine.sequences.parking.used_tokens == 0


def test_idle_sequences_are_parked_while_a_turn_runs() -> None:
    engine, harness = parking_harness()
    for number in (1, 2):
        harness.ask([number] * 80, max_tokens=1)
    running = harness.submit([3] * 40, max_tokens=20)
    while not running.tokens:
        harness.scheduler.step()
    assert engine.sequences.parking
    assert engine.sequences.parking.used_tokens == 0  # its first token does not wait for that
    harness.scheduler.step()
    assert engine.sequences.parking.used_tokens == 160
    assert engine.sequences.free_tokens() == engine.pool_tokens - 41
    assert engine.counts.exported_tokens == 0
    harness.run(running)


def test_a_parked_conversation_is_continued_from_the_device() -> None:
    engine, harness = parking_harness()
    harness.ask([1] * 80, max_tokens=1)
    harness.ask([2] * 40, max_tokens=4)
    computed = engine.counts.computed_tokens
    reply = harness.ask([1] * 90, max_tokens=1)
    assert (reply.reused, reply.finished.cache.tier) == (80, "device")
    assert engine.counts.computed_tokens == computed + 10
    assert reply.tokens == RuntimeHarness(FakeEngine()).ask([1] * 90, max_tokens=1).tokens
    assert engine.counts.restored_tokens == 0


def continued_harness(sequences: int = 12) -> tuple[FakeEngine, RuntimeHarness]:
    """A conversation that was parked runs; what was parked of it is of no more use."""
    fake = FakeEngine(device="gpu", pool_tokens=1024, park_tokens=250, max_sequences=sequences)
    harness = RuntimeHarness(fake, idle_tokens=None)
    first = harness.ask([1] * 80, max_tokens=3)
    harness.ask([2] * 80, max_tokens=3)
    assert fake.sequences.parking
    assert fake.sequences.parking.used_tokens == 82
    reply = harness.submit([1] * 80 + first.tokens + [3], max_tokens=50)
    while not reply.tokens:
        harness.scheduler.step()
    return fake, harness


def test_a_first_token_does_not_wait_until_what_was_parked_is_freed() -> None:
    engine, harness = continued_harness()
    assert engine.sequences.parking
    assert engine.sequences.parking.used_tokens >= 82
    harness.run()
    harness.offload()
    assert engine.sequences.parking.used_tokens == 82  # of the other one
    assert engine.open_sequences == 2


def test_what_was_parked_of_a_running_turn_makes_room_for_others() -> None:
    engine, harness = continued_harness()
    assert engine.sequences.parking
    harness.ask([4] * 100, max_tokens=1)
    harness.ask([5] * 100, max_tokens=3)  # the third is parked, in its place
    assert engine.sequences.parking.used_tokens <= 250
    assert engine.counts.exported_tokens == 0


def test_what_was_parked_of_a_running_turn_holds_no_sequence_that_another_needs() -> None:
    engine, harness = continued_harness(sequences=7)
    replies = [harness.submit([4 + number] * 20, max_tokens=3) for number in range(3)]
    harness.run(*replies)
    assert all(reply.finished for reply in replies)
    assert engine.open_sequences <= 7


def test_nothing_stays_parked_of_a_conversation_that_is_deleted() -> None:
    engine, harness = continued_harness()
    assert engine.sequences.parking
    [entry] = [each for each in harness.entries.of(None) if each.first(1) == [2]]
    harness.entries.remove(entry)
    assert engine.sequences.parking.used_tokens == 0


def test_a_few_idle_replies_leave_the_pool_before_state_is_copied_into_it() -> None:
    """Their cells may lie apart, and what is copied would lie between them."""
    engine, harness = parking_harness()
    first = harness.ask([1] * 80, max_tokens=3)
    harness.ask([2] * 40, max_tokens=3)  # stays in the pool
    assert engine.sequences.parking
    assert engine.sequences.parking.used_tokens == 82
    reply = harness.submit([1] * 80 + first.tokens + [3], max_tokens=3)
    harness.scheduler.step()
    assert engine.sequences.free_tokens() <= engine.pool_tokens - 83
    assert [each.sequence.is_parked for each in harness.kv.idle] == [True]
    harness.run(reply)
    assert (reply.reused, reply.finished.cache.tier) == (82, "device")
    assert engine.counts.exported_tokens == 0


def test_a_parked_conversation_of_which_little_is_of_use_is_not_copied() -> None:
    engine, harness = parking_harness()
    harness.ask([1] * 400, max_tokens=1)
    harness.ask([2] * 40, max_tokens=3)
    assert engine.sequences.parking
    assert engine.sequences.parking.used_tokens == 400
    assert harness.ask([1] * 40 + [3] * 20, max_tokens=1).reused == 0
    assert harness.ask([1] * 50 + [3] * 20, max_tokens=1).reused == 50


def test_those_parked_longest_leave_for_the_store_when_there_is_no_more_room() -> None:
    engine, harness = parking_harness(park_tokens=200)
    for number in range(5):
        harness.ask([number] * 80, max_tokens=3)
    assert engine.sequences.parking
    assert engine.sequences.parking.used_tokens == 2 * 82
    harness.offload()
    tiers = [harness.ask([number] * 81, max_tokens=1).finished.cache.tier for number in (0, 4)]
    assert tiers == ["ram", "device"]


def test_a_tenant_with_many_conversations_does_not_push_out_those_of_others() -> None:
    _, harness = parking_harness(park_tokens=300)
    harness.ask([1] * 80, max_tokens=3, salt=b"one")
    for number in range(2, 9):
        harness.ask([number] * 80, max_tokens=3, salt=b"another")
    harness.offload()
    again = harness.ask([1] * 81, max_tokens=1, salt=b"one")
    assert again.finished.cache.tier == "device"


def test_a_conversation_that_has_gone_on_stays_parked_longer_than_one_begun_later() -> None:
    _, harness = parking_harness(park_tokens=180)
    for length in (80, 83, 86):
        harness.ask([1] * length, max_tokens=1)
    for number in (2, 3, 4):
        harness.ask([number] * 80, max_tokens=3)
    harness.offload()
    asked = ([2] * 81, [1] * 87)
    tiers = [harness.ask(tokens, max_tokens=1).finished.cache.tier for tokens in asked]
    assert tiers == ["ram", "device"]


def test_a_sequence_too_long_to_park_goes_to_the_store() -> None:
    engine, harness = parking_harness(park_tokens=50)
    harness.ask([1] * 80, max_tokens=1)
    harness.ask([2] * 40, max_tokens=4)
    assert engine.counts.exported_tokens >= 80
    assert harness.ask([1] * 81, max_tokens=1).finished.cache.tier == "ram"


def test_parked_conversations_are_exported_in_idle_moments() -> None:
    engine, harness = parking_harness()
    for number in range(3):
        harness.ask([number] * 80, max_tokens=1)
    while harness.scheduler.step():
        pass
    assert engine.counts.exported_tokens == 3 * 80
    assert engine.sequences.parking
    assert (
        engine.sequences.parking.used_tokens == 2 * 80
    )  # all but the newest, which may go on next
    assert engine.sequences.free_tokens() == engine.pool_tokens - 80


def test_a_pool_full_of_idle_sequences_makes_room_though_nothing_can_be_copied() -> None:
    _, harness = parking_harness(pool_tokens=512, park_tokens=200)
    harness.ask([1] * 190, max_tokens=1)
    harness.ask([2] * 500, max_tokens=1)  # the first is parked, this one fills the pool
    reply = harness.ask([3] * 500, max_tokens=1)
    assert reply.tokens
    assert harness.ask([2] * 501, max_tokens=1).reused == 500


def test_what_a_turn_is_to_share_does_not_make_room_for_it() -> None:
    _, harness = parking_harness(pool_tokens=512, park_tokens=300)
    harness.ask([1] * 250, max_tokens=1)
    harness.ask([2] * 280, max_tokens=1)
    harness.ask([3] * 40, max_tokens=1)
    cold = RuntimeHarness(FakeEngine()).ask([1] * 260, max_tokens=1)
    assert harness.ask([1] * 260, max_tokens=1).tokens == cold.tokens


def test_closing_keeps_what_is_parked() -> None:
    engine, harness = parking_harness(pool_tokens=512)
    for number in range(4):
        harness.ask([number] * 200, max_tokens=1)
    harness.kv.offload_all()
    assert engine.counts.exported_tokens == 4 * 200


# -- where cells of replies lie apart ----------------------------------------------------------


def scattering_harness(park_tokens: int) -> tuple[FakeEngine, RuntimeHarness]:
    engine = FakeEngine(device="gpu", park_tokens=park_tokens, scatters=True)
    return engine, RuntimeHarness(engine)


def talk_together(harness: RuntimeHarness) -> list[list[int]]:
    """Two conversations whose replies were computed in the same steps."""
    replies = [harness.submit([number] * 40, max_tokens=10) for number in (1, 2)]
    for reply in replies:
        harness.run(reply)
    return [reply.turn.tokens.ids[:] for reply in replies]


@pytest.mark.parametrize("park_tokens", [0, 1000])
def test_what_lies_apart_is_not_moved_but_computed_again(park_tokens: int) -> None:
    engine, harness = scattering_harness(park_tokens)
    said = talk_together(harness)
    harness.ask([3] * 200, max_tokens=30)  # the others have to leave the pool
    if not park_tokens:
        harness.kv.make_room(engine.pool_tokens)
    replies = [harness.ask([*tokens, 7], max_tokens=3) for tokens in said]
    assert [reply.reused for reply in replies] == [40, 40]
    assert engine.counts.scattered_exports == 0
    plain = RuntimeHarness(FakeEngine())
    expected = [plain.ask([*tokens, 7], max_tokens=3).tokens for tokens in said]
    assert [reply.tokens for reply in replies] == expected


@pytest.mark.parametrize("park_tokens", [0, 1000])
def test_in_an_idle_moment_it_is_computed_again_for_the_next_turn(park_tokens: int) -> None:
    engine, harness = scattering_harness(park_tokens)
    said = talk_together(harness)
    while harness.scheduler.step():
        pass
    assert engine.counts.exported_tokens == 2 * 49
    assert engine.counts.scattered_exports == 0
    harness.kv.make_room(engine.pool_tokens)
    replies = [harness.ask([*tokens, 7], max_tokens=3) for tokens in said]
    assert [reply.reused for reply in replies] == [49, 49]
    plain = RuntimeHarness(FakeEngine())
    expected = [plain.ask([*tokens, 7], max_tokens=3).tokens for tokens in said]
    assert [reply.tokens for reply in replies] == expected


def test_in_an_idle_moment_all_are_cut_before_the_first_is_computed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, harness = scattering_harness(park_tokens=1000)
    talk_together(harness)
    apart: list[int | None] = []
    launch = engine.launch

    def watched(work: Seq[Work]) -> FakePending:
        apart.extend(idle.sequence.scattered_from for idle in harness.kv.idle)
        return launch(work)

    monkeypatch.setattr(engine, "launch", watched)
    while harness.scheduler.step():
        pass
    assert apart == [None] * 4


def test_parked_state_that_does_not_fit_into_the_pool_is_done_without() -> None:
    engine = FakeEngine(device="gpu", pool_tokens=1024, context_tokens=1020, park_tokens=2000)
    harness = RuntimeHarness(engine)
    harness.ask([1] * 1000, max_tokens=1)
    harness.ask([2] * 300, max_tokens=3)  # the first is parked, this one stays in the pool
    prompt = [1] * 200 + [5] * 10
    cold = RuntimeHarness(FakeEngine()).ask(prompt, max_tokens=40)
    assert harness.ask(prompt, max_tokens=40).tokens == cold.tokens


def test_a_turn_does_not_wait_for_room_that_only_its_parked_source_needs() -> None:
    engine = FakeEngine(device="gpu", pool_tokens=1024, context_tokens=1020, park_tokens=2000)
    harness = RuntimeHarness(engine)
    harness.ask([1] * 900, max_tokens=1)
    talker = harness.submit([2] * 100, max_tokens=400)
    while len(talker.tokens) < 3:
        harness.scheduler.step()
    harness.run(reply := harness.submit([1] * 200 + [5] * 10, max_tokens=2))
    assert reply.tokens
    assert not talker.ended


@pytest.mark.parametrize("park_tokens", [400, 2000])
def test_many_idle_conversations_in_a_full_pool_let_others_in(park_tokens: int) -> None:
    engine = FakeEngine(
        device="gpu", pool_tokens=512, context_tokens=500, park_tokens=park_tokens, max_sequences=7
    )
    harness = RuntimeHarness(engine)
    for number in range(12):
        harness.ask([number] * 300, max_tokens=3)  # no idle moment between two
    assert len(harness.kv.idle) <= 7


def test_branches_of_one_reply_are_gathered_only_where_there_is_room() -> None:
    for pool_tokens in (240, 300, 400):
        engine = FakeEngine(
            device="gpu",
            pool_tokens=pool_tokens,
            context_tokens=pool_tokens - 10,
            park_tokens=1000,
            scatters=True,
            batch_tokens=300,
            max_sequences=20,
        )
        harness = RuntimeHarness(engine)
        replies = [harness.submit([number] * 40, max_tokens=80) for number in (1, 2)]
        harness.run(*replies)
        ids = replies[0].turn.tokens.ids[:-1]
        branches = [harness.submit([*ids, number] + [8] * 20, max_tokens=2) for number in (7, 9)]
        harness.run(*branches)
        while harness.scheduler.step():
            pass
        assert engine.counts.resets == 0


def test_a_reply_that_is_cut_to_nothing_is_not_exported() -> None:
    """Of a prompt of one token, computed beside others, all lies apart."""
    engine = FakeEngine(device="gpu", park_tokens=800, scatters=True, async_launch=True)
    harness = RuntimeHarness(engine)
    quantised: dict[str, Any] = {"kv_bits": 8, "kv_quantization_start": 0}
    harness.submit(list(range(10, 60)), max_tokens=200, **quantised)
    for _ in range(6):
        harness.scheduler.step()
    harness.run(one := harness.submit([77], max_tokens=4, **quantised))
    for _ in range(2):
        harness.kv.release_idle()
        harness.scheduler.step()
    assert one.tokens


def full_engine(**sizes: Any) -> FakeEngine:
    return FakeEngine(device="gpu", scatters=True, async_launch=True, **sizes)


def test_a_parked_conversation_is_used_while_a_copy_of_it_is_exported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(idle_pool, "MAX_FRAGMENT_TOKENS", 20)
    engine = full_engine(park_tokens=1000, pool_tokens=1000, context_tokens=900)
    harness = RuntimeHarness(engine)
    long = harness.ask([11, *range(20, 620)], max_tokens=8)
    harness.ask([12, *range(30, 60)], max_tokens=8)
    for _ in range(40):
        harness.scheduler.step()
    assert any(idle.copy for idle in harness.kv.idle)
    assert harness.ask([*long.turn.tokens.ids, 5, 6, 7], max_tokens=8).reused >= 600


def test_an_export_that_was_asked_for_finds_room_in_a_full_pool() -> None:
    engine = full_engine(park_tokens=400, pool_tokens=600, context_tokens=580)
    harness = RuntimeHarness(engine, parallel=2)
    harness.ask([11, *range(20, 370)], max_tokens=8)
    [parked] = harness.kv.idle
    harness.kv.idle.default._exports.drop_or_recompute(parked)
    assert engine.sequences.parking
    assert engine.sequences.parking.park(parked.sequence)
    harness.ask([12, *range(20, 420)], max_tokens=8)
    done: list[bool] = []
    handle = PrefixHandle(parked.namespace, parked.tokens)
    harness.kv.export(handle, lambda: done.append(True))
    for _ in range(300):
        harness.scheduler.step()
    assert done
