"""What turns leave behind, and what later ones find of it."""

from __future__ import annotations

import pytest

from rekindle.chat.prompt import MessageSpan, Prompt
from rekindle.tokens import Tokens
from tests.support.fake import CELL_BYTES, FakeEngine
from tests.support.harness import RuntimeHarness

SYSTEM = list(range(200, 264))  # eight blocks


def flush(harness: RuntimeHarness) -> None:
    """Push everything out of the pool, down to RAM."""
    harness.offload()
    assert harness.kv.make_room(harness.capabilities.pool_tokens)


def test_the_second_turn_computes_only_the_new_tokens() -> None:
    engine = FakeEngine()
    harness = RuntimeHarness(engine)
    first = harness.ask(SYSTEM, max_tokens=10)
    computed = engine.counts.computed_tokens
    new = [1, 2, 3]
    second = harness.ask([*SYSTEM, *first.tokens, *new], max_tokens=1)
    # The last sampled token was never fed back: it is computed now, with the new ones.
    assert engine.counts.computed_tokens - computed == 1 + len(new)
    assert second.reused == len(SYSTEM) + len(first.tokens) - 1
    assert second.finished.cache.status == "hit"


def test_reuse_through_ram_answers_as_reuse_on_the_device() -> None:
    harness = RuntimeHarness(FakeEngine())
    first = harness.ask(SYSTEM, max_tokens=10)
    flush(harness)
    history = [*SYSTEM, *first.tokens, 1, 2, 3]
    second = harness.ask(history, max_tokens=10)
    assert second.finished.cache.tier == "ram"
    assert second.reused == len(SYSTEM) + len(first.tokens) - 1
    assert second.tokens == RuntimeHarness(FakeEngine()).ask(history, max_tokens=10).tokens


def test_a_hundred_conversations_store_their_system_prompt_once() -> None:
    engine = FakeEngine()
    harness = RuntimeHarness(engine)
    for number in range(100):
        harness.ask([*SYSTEM, 500 + number, 7, 7], max_tokens=3)
        flush(harness)
    tails = 100 * (3 + 3 - 1) * CELL_BYTES
    assert engine.counts.exported_tokens * CELL_BYTES == len(SYSTEM) * CELL_BYTES + tails
    assert harness.store.counts.stored_bytes == len(SYSTEM) * CELL_BYTES + tails
    assert engine.counts.computed_tokens == len(SYSTEM) + 100 * (3 + 3 - 1)


def test_a_turn_exports_only_its_new_blocks() -> None:
    engine = FakeEngine()
    harness = RuntimeHarness(engine)
    history = list(SYSTEM)
    size = engine.block_tokens
    full_blocks = 0  # tokens in whole blocks, which are never exported again
    for turn in range(5):
        before = engine.counts.exported_tokens
        reply = harness.ask(history, max_tokens=12)
        flush(harness)
        held = len(history) + len(reply.tokens) - 1
        assert engine.counts.exported_tokens - before == held - full_blocks
        full_blocks = held // size * size
        history += [*reply.tokens, 1 + turn, 2]


@pytest.mark.parametrize("cut", [0, 1, 7, 8, 9, 31, 32, 33, 62, 63])
@pytest.mark.parametrize("through_ram", [False, True])
def test_a_history_edited_anywhere_reuses_up_to_the_edit(cut: int, through_ram: bool) -> None:
    harness = RuntimeHarness(FakeEngine())
    harness.ask(SYSTEM)
    if through_ram:
        flush(harness)
    edited = [*SYSTEM[:cut], 999, *SYSTEM[cut + 1 :], 4]
    reply = harness.ask(edited)
    assert reply.reused == cut
    assert reply.tokens == RuntimeHarness(FakeEngine()).ask(edited).tokens
    assert reply.finished.cache.status == ("partial_hit" if cut else "miss")


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 15, 16, 17, 63, 64])
@pytest.mark.parametrize("exact", [False, True])
def test_a_repeated_prompt_of_any_length_computes_at_least_its_last_token(
    length: int, exact: bool
) -> None:
    engine = FakeEngine()
    harness = RuntimeHarness(engine)
    prompt = SYSTEM[:length]
    first = harness.ask(prompt, exact=exact)
    flush(harness)
    second = harness.ask(prompt, exact=exact)
    assert second.tokens == first.tokens
    step = engine.capabilities.step_tokens
    expected = (length - 1) // step * step if exact else length - 1
    assert second.reused == expected


def test_truncating_and_branching_reuse_what_is_common() -> None:
    harness = RuntimeHarness(FakeEngine())
    first = harness.ask(SYSTEM, max_tokens=20)
    history = [*SYSTEM, *first.tokens]
    assert harness.ask(history[:70], max_tokens=1).reused == 69
    assert harness.ask([*history[:66], 1, 1], max_tokens=1).reused == 66
    assert harness.ask([*history, 2], max_tokens=1).reused == len(history) - 1


def test_exact_turns_reuse_only_what_exact_turns_computed() -> None:
    harness = RuntimeHarness(FakeEngine())
    harness.ask(SYSTEM)
    flush(harness)
    first = harness.ask(SYSTEM, exact=True)
    assert first.reused == 0
    assert first.finished.cache.reason == "exact_boundary"
    assert harness.ask([*SYSTEM, 1], exact=True).reused == len(SYSTEM)
    assert harness.ask([*SYSTEM, 1]).reused >= len(SYSTEM)


def test_exact_turns_never_reuse_sampled_tokens() -> None:
    harness = RuntimeHarness(FakeEngine())
    first = harness.ask(SYSTEM, exact=True, max_tokens=40)
    second = harness.ask([*SYSTEM, *first.tokens, 1], exact=True)
    assert second.reused == len(SYSTEM)


def test_exact_turns_that_come_together_compute_their_prefix_once() -> None:
    engine = FakeEngine()
    harness = RuntimeHarness(engine)
    replies = [harness.submit([*SYSTEM, n], exact=True, max_tokens=1) for n in range(3)]
    harness.run()
    assert [reply.reused for reply in replies] == [0, len(SYSTEM), len(SYSTEM)]


def test_no_room_in_ram_is_no_reuse_and_no_error() -> None:
    engine = FakeEngine()
    harness = RuntimeHarness(engine, ram_bytes=0)
    harness.ask(SYSTEM)
    flush(harness)
    again = harness.ask(SYSTEM)
    assert again.reused == 0
    assert again.finished.cache.status == "miss"
    assert again.finished.cache.reason == "not_cached"


def test_the_report_names_the_part_that_changed() -> None:
    spans = (MessageSpan(0, "system", 64), MessageSpan(1, "user", 70))
    harness = RuntimeHarness(FakeEngine())
    harness.ask(Prompt(Tokens.of([*SYSTEM, *[1] * 6]), spans))
    changed_turn = harness.ask(Prompt(Tokens.of([*SYSTEM, *[2] * 6]), spans))
    assert changed_turn.finished.cache.reason == "turn_changed"
    other = [*SYSTEM[:30], 9, *SYSTEM[31:]]
    changed_system = harness.ask(Prompt(Tokens.of([*other, *[2] * 6]), spans))
    assert changed_system.finished.cache.reason == "system_changed"
    assert changed_system.finished.cache.status == "partial_hit"  # a part of the message was reused
    assert changed_system.reused == 30


def test_residents_beyond_their_share_go_down_to_ram() -> None:
    engine = FakeEngine()
    harness = RuntimeHarness(engine, idle_tokens=150)
    for number in range(5):
        harness.ask([number, *SYSTEM], max_tokens=2)
    assert engine.pool_tokens - engine.sequences.free_tokens() <= 150
    assert harness.ask([0, *SYSTEM], max_tokens=2).finished.cache.tier == "ram"


def test_a_resident_shared_to_its_end_lives_on_once() -> None:
    engine = FakeEngine()
    harness = RuntimeHarness(engine)
    history = list(SYSTEM)
    for _ in range(6):
        reply = harness.ask(history, max_tokens=4)
        history += [*reply.tokens, 3]
    assert engine.open_sequences == 1


@pytest.mark.parametrize("shares_cells", [False, True])
def test_a_turn_has_room_for_its_own_copy_of_what_it_shares(shares_cells: bool) -> None:
    """Where sequences have cells of their own, what is shared is counted again."""
    engine = FakeEngine(pool_tokens=130, context_tokens=130, shares_cells=shares_cells)
    harness = RuntimeHarness(engine)
    first = list(range(10, 70))
    harness.ask(first, max_tokens=4)
    branch = [*first[:50], *range(200, 230)]
    reply = harness.ask(branch, max_tokens=4)
    assert reply.reused >= 48
    assert (reply.finished.cache.tier == "device") == shares_cells
    assert engine.sequences.free_tokens() >= 0
    assert harness.kv.counts.preemptions == 0
    assert reply.tokens == RuntimeHarness(FakeEngine()).ask(branch, max_tokens=4).tokens


def test_a_conversation_that_goes_on_takes_over_its_cells() -> None:
    """Its source is closed at once: no copy has to fit beside it."""
    engine = FakeEngine(pool_tokens=130, context_tokens=130, shares_cells=False)
    harness = RuntimeHarness(engine)
    history = list(range(10, 80))
    reply = harness.ask(history, max_tokens=4)
    reply = harness.ask([*history, *reply.tokens, 3], max_tokens=4)
    assert reply.finished.cache.tier == "device"
    assert reply.reused >= len(history)
