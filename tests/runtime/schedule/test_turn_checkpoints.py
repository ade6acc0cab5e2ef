"""State that cannot be cut: turns go on from checkpoints, and answer as if they had not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rekindle.chat.prompt import MessageSpan, Prompt
from rekindle.errors import EngineBroken
from rekindle.kvcache.block import chain
from rekindle.kvcache.tiers.ram import RamTier
from rekindle.protocol.admin import DeleteEntry, Flush, Validate, Validation
from rekindle.protocol.requests import Names, Prepare
from rekindle.runtime.schedule.turn import MIN_INTERVAL_TOKENS, Checkpoints, interval_tokens
from rekindle.tokens import Tokens
from tests.support.fake import CELL_BYTES, CHECKPOINT_BYTES, FakeEngine
from tests.support.harness import Reply, RuntimeHarness

SYSTEM = list(range(100, 160))
USER = list(range(200, 230))
HEADER = [7, 8]  # what a template writes after each message
PROMPT = [*SYSTEM, *HEADER, *USER, *HEADER]


def engine(**options: Any) -> FakeEngine:
    return FakeEngine(can_truncate=False, **options)


def said(tokens: list[int], *messages: tuple[str, int, int]) -> Prompt:
    """A prompt whose messages are (role, start, end)."""
    spans = (MessageSpan(at, role, end, start) for at, (role, start, end) in enumerate(messages))
    return Prompt(Tokens.of(tokens), tuple(spans))


CHAT = said(PROMPT, ("system", 0, 60), ("user", 62, 92))


def cold(tokens: list[int] | Prompt, **ask: object) -> list[int]:
    return RuntimeHarness(engine()).ask(tokens, **ask).tokens


def went_on(reply: Reply) -> list[int]:
    """All that its sequence held at its end."""
    return reply.turn.tokens.ids[:-1]  # the last token was sampled, not computed


def test_the_next_turn_computes_what_is_new_alone() -> None:
    harness = RuntimeHarness(engine())
    first = harness.ask(CHAT)
    longer = [*went_on(first), 1, 2, 3]
    second = harness.ask(longer)
    assert second.reused == len(went_on(first))
    assert second.tokens == cold(longer)


def test_twenty_turns_compute_each_token_once() -> None:
    fake = engine(context_tokens=2048)
    harness = RuntimeHarness(fake)
    tokens = list(PROMPT)
    for turn in range(20):
        reply = harness.ask(tokens)
        tokens = [*went_on(reply), 300 + turn, 301 + turn]
    assert fake.counts.computed_tokens == len(tokens) - 2


def test_a_reply_that_is_not_sent_back_as_it_was_resumes_at_the_end_of_the_prompt() -> None:
    """Reasoning that a template drops, words that it writes only in front of a reply."""
    harness = RuntimeHarness(engine())
    harness.ask(CHAT)
    edited = [*PROMPT[:92], 11, 12, 13, 14]
    again = harness.ask(edited)
    assert again.reused == 92
    assert again.tokens == cold(edited)


def test_another_user_message_resumes_after_the_system_prompt() -> None:
    harness = RuntimeHarness(engine())
    harness.ask(CHAT)
    other = harness.ask([*SYSTEM, *HEADER, 9, 9, 9])
    assert other.reused == len(SYSTEM) + len(HEADER)


def test_conversations_that_part_where_nothing_was_kept_part_there_once() -> None:
    """The second pays, and leaves a checkpoint for the third."""
    harness = RuntimeHarness(engine())
    harness.ask(PROMPT)
    reused = [harness.ask([*PROMPT[:70], branch, branch, branch]).reused for branch in (1, 2, 3)]
    assert reused[0] < 70
    assert reused[1:] == [70, 70]


def test_followers_wait_and_share_what_the_leader_computes() -> None:
    fake = engine()
    harness = RuntimeHarness(fake)
    replies = [harness.submit([*PROMPT, branch, branch], max_tokens=1) for branch in range(4)]
    harness.run()
    assert fake.counts.computed_tokens == len(PROMPT) + 4 * 2
    assert [reply.reused for reply in replies] == [0, *[len(PROMPT)] * 3]


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("tier", ["ram", "disk", "restart"])
def test_every_tier_gives_checkpoints_back(tmp_path: Path, tier: str, exact: bool) -> None:
    ram_bytes = 8_000 if tier == "disk" else 1 << 30
    harness = RuntimeHarness(engine(), folder=tmp_path, idle_tokens=0, ram_bytes=ram_bytes)
    first = harness.ask(CHAT, exact=exact)
    harness.offload()
    if tier == "disk":
        harness.store.write_back.write_everything()
        harness.flush()
        harness.ask(list(range(500, 600)))  # takes the room
    if tier == "restart":
        harness.close()
        harness = RuntimeHarness(engine(), folder=tmp_path, idle_tokens=0)
    longer = [*went_on(first), 1, 2, 3]
    second = harness.ask(longer, exact=exact)
    harness.close()
    assert second.tokens == cold(longer, exact=True)
    assert second.reused == (80 if exact else len(went_on(first)))
    assert second.finished.cache.tier == ("ram" if tier == "ram" else "disk")


def test_exact_turns_take_whole_steps_only() -> None:
    harness = RuntimeHarness(engine())
    harness.ask(CHAT)  # leaves checkpoints, but not of canonical steps
    assert harness.ask(CHAT, exact=True).reused == 0
    assert harness.ask(CHAT, exact=True).reused == 80


def test_checkpoints_stay_within_the_budget() -> None:
    harness = RuntimeHarness(engine(context_tokens=2048), ram_bytes=30_000)
    for number in range(30):
        harness.ask([number, *range(100, 300)])
        harness.offload()
        assert harness.store.tiers[0].budget.used_bytes <= 30_000


def test_a_prepared_prompt_is_resumed_at_its_very_end() -> None:
    harness = RuntimeHarness(engine())
    prepared = harness.ask(PROMPT, prepare=Prepare(pinned=True, ttl_s=None))
    key = prepared.finished.cache.new_cache_key
    assert key is not None
    turn = harness.ask([*PROMPT, 1, 2], names=Names(cache_key=key))
    assert turn.reused == len(PROMPT)
    assert turn.finished.cache.status == "hit"


def test_a_block_that_lost_its_checkpoint_is_a_miss_and_not_an_answer() -> None:
    harness = RuntimeHarness(engine())
    first = harness.ask(CHAT)
    for block in harness.store:
        if block.resumable and (blob := harness.store.get(block)):
            harness.store.tiers[0].put(block, blob[:-CHECKPOINT_BYTES])
    longer = [*went_on(first), 1]
    assert harness.ask(longer).tokens == cold(longer)


# -- where they are taken ------------------------------------------------------------------------


def places(prompt: Prompt, *, exact: bool = False, held: int = 0) -> list[int]:
    taken = Checkpoints(prompt, engine().capabilities, exact=exact, held=held)
    found, at = [], 0
    while (place := taken.next_after(at)) is not None:
        found.append(place)
        at = place
    return found


def test_they_are_taken_where_conversations_part() -> None:
    assert places(CHAT) == [62, 92]
    assert places(CHAT, exact=True) == [48, 80]


def test_one_just_behind_another_is_not_worth_it() -> None:
    assert places(CHAT, held=60) == [92]
    assert places(CHAT, held=90) == []


def test_a_long_prompt_has_them_at_intervals() -> None:
    interval = interval_tokens(engine().capabilities)
    assert interval == MIN_INTERVAL_TOKENS
    long = said([5] * 2000, ("user", 0, 1998))
    assert places(long) == [512, 1024, 1536, 1998]


# -- when things go wrong ------------------------------------------------------------------------


def blocks_of(harness: RuntimeHarness) -> dict[tuple[int, ...], bytes | None]:
    """What the store holds: the tokens up to each block's end, and its cells."""
    found = {}
    for block in harness.store:
        path = [token for each in reversed(list(chain(block))) for token in each.tokens]
        blob = harness.store.get(block)
        found[tuple(path)] = bytes(blob)[: len(block.tokens) * CELL_BYTES] if blob else None
    return found


def test_a_store_that_was_full_for_a_while_is_given_no_block_in_a_wrong_place() -> None:
    """The first checkpoint finds no room; then there is some, and another turn keeps the block that
    was refused. What the turn keeps later must not be put under that one."""
    fake = engine(batch_tokens=16)
    harness = RuntimeHarness(fake)
    long = list(range(100, 300))
    turn = harness.submit(said(long, ("system", 0, 20), ("user", 22, 180)), max_tokens=4)
    ram = harness.store.tiers[0]
    assert isinstance(ram, RamTier)
    limit, ram.budget.limit_bytes = ram.budget.limit_bytes, 0
    while turn.turn.held_tokens < 22:
        harness.scheduler.step()
    ram.budget.limit_bytes = limit
    other = harness.submit([*long[:30], 1, 2, 3], max_tokens=1, exact=True)
    harness.run(other, turn)
    harness.offload()
    right = RuntimeHarness(engine())
    for path, cells in blocks_of(harness).items():
        right.ask(list(path), max_tokens=1)
        right.offload()
        assert blocks_of(right)[path] == cells


def test_a_turn_whose_earlier_blocks_were_evicted_still_keeps_its_end() -> None:
    fake = engine(batch_tokens=16)
    harness = RuntimeHarness(fake, idle_tokens=0)
    reply = harness.submit(CHAT, max_tokens=40)
    while reply.turn.generated_tokens < 20:
        harness.scheduler.step()
    for block in list(harness.store):
        harness.store.drop(block)
    harness.run(reply)
    longer = [*went_on(reply), 1, 2, 3]
    assert harness.ask(longer).reused == len(went_on(reply))


def test_turns_that_ended_together_stay_ended_when_keeping_the_first_breaks_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = engine()
    harness = RuntimeHarness(fake, idle_tokens=0)
    replies = [harness.submit([n, *range(100, 104)], max_tokens=3) for n in range(3)]
    while not all(reply.turn.generated_tokens == 2 for reply in replies):
        harness.scheduler.step()

    def broken(*_args: object, **_options: object) -> bytes:
        fake.sequences.reset()
        raise EngineBroken("export failed")

    with monkeypatch.context() as patch:
        patch.setattr(fake.sequences, "export", broken)
        harness.scheduler.step()
    assert all(reply.ended for reply in replies)
    assert harness.scheduler.turns == 0
    assert harness.ask(PROMPT).tokens == cold(PROMPT)


def test_a_corrupt_checkpoint_on_disk_costs_no_more_than_what_is_behind_the_one_before(
    tmp_path: Path,
) -> None:
    harness = RuntimeHarness(engine(), folder=tmp_path, idle_tokens=0)
    first = harness.ask(CHAT)
    harness.close()
    harness = RuntimeHarness(engine(), folder=tmp_path, idle_tokens=0)
    longer = [*went_on(first), 1, 2, 3]
    newest = next(harness.store.checkpoints(harness.namespace(), Tokens.of(longer)))
    assert harness.disk is not None
    file = harness.disk.folder.path / "blocks" / newest.key.hex()
    file.write_bytes(file.read_bytes()[:-1])
    second = harness.ask(longer)
    harness.close()
    assert second.tokens == cold(longer)
    assert second.reused == 92
    assert second.finished.cache.reason == "corrupt"


def test_choices_of_one_prompt_share_its_cells() -> None:
    fake = engine()
    harness = RuntimeHarness(fake)
    replies = [harness.submit(PROMPT, max_tokens=30) for _ in range(4)]
    while not all(reply.started for reply in replies):
        harness.scheduler.step()
    assert fake.pool_tokens - fake.sequences.free_tokens() < 2 * len(PROMPT)
    harness.run()
    assert fake.counts.computed_tokens == len(PROMPT) - 1 + 4 * 30
    assert {tuple(reply.tokens) for reply in replies} == {tuple(cold(PROMPT, max_tokens=30))}


def test_a_question_beforehand_says_what_is_short_of_a_checkpoint() -> None:
    """All the state is there, but none to go on from at the end of what is asked about."""
    harness = RuntimeHarness(engine(), idle_tokens=0)
    first = harness.ask(CHAT, names=Names(return_cache_key=True))
    key = first.finished.cache.new_cache_key
    assert key is not None
    longer = [*first.turn.tokens, 1, 2, 3]
    for block in list(harness.store):
        if block.stop == len(went_on(first)):
            harness.store.drop(block)
    harness.ask([*longer, *range(40, 60)])
    for block in harness.store:
        if block.resumable and block.stop > 92:
            block.kind = block.kind._replace(resumable=False)
    told = harness.administer(
        Validate(cache_key=key, messages=[]), prompt=Prompt(Tokens.of(longer))
    )
    assert isinstance(told, Validation)
    assert (told.status, told.reason, told.reusable_tokens) == (
        "partial_hit",
        "checkpoint_boundary",
        92,
    )


def test_what_an_entry_holds_is_what_a_turn_could_go_on_from(tmp_path: Path) -> None:
    """Not the cells of its tokens in another's longer block."""
    harness = RuntimeHarness(engine(), folder=tmp_path, idle_tokens=0)
    prepared = harness.ask(PROMPT, prepare=Prepare(pinned=False, ttl_s=None))
    harness.ask([*PROMPT, *range(40, 60)])
    [entry] = [
        e for e in harness.entries.of(None) if e.key == prepared.finished.cache.new_cache_key
    ]
    assert harness.runtime.cache_info.info(entry).held_tokens == len(PROMPT)
    harness.flush()
    assert (
        harness.runtime.cache_info.info(entry).stored_tokens == 0
    )  # whole blocks are; no checkpoint is
    harness.store.write_back.write_everything()
    harness.flush()
    assert harness.runtime.cache_info.info(entry).stored_tokens == len(PROMPT)
    for block in list(harness.store):
        if block.stop == len(PROMPT):
            harness.store.drop(block)
    assert harness.runtime.cache_info.info(entry).held_tokens == len(PROMPT) - 1
    harness.close()


@pytest.mark.parametrize("question", ["flush", "delete"])
@pytest.mark.parametrize("then", ["go on", "give up"])
def test_an_engine_that_breaks_over_a_question_loses_no_turn(
    monkeypatch: pytest.MonkeyPatch, question: str, then: str
) -> None:
    """What is idle is kept before the answer; turns that run have lost their sequences, too."""
    fake = engine()
    harness = RuntimeHarness(fake)
    first = harness.ask(PROMPT, names=Names(return_cache_key=True))
    harness.ask([*first.turn.tokens, 5, 6, 7], max_tokens=2)
    key = first.finished.cache.new_cache_key
    assert key is not None
    running = harness.submit(list(range(500, 560)), max_tokens=20)
    while running.turn.generated_tokens < 5:
        harness.scheduler.step()

    def broken(*_args: object, **_options: object) -> bytes:
        fake.sequences.reset()
        raise EngineBroken("export failed")

    with monkeypatch.context() as patch:
        patch.setattr(fake.sequences, "export", broken)
        if question == "flush":
            harness.administer(Flush(key))
        else:
            harness.administer(DeleteEntry(key))
    if then == "give up":
        harness.cancel(running)
    harness.run(running)
    expected = cold(list(range(500, 560)), max_tokens=20)
    assert running.tokens == expected[: len(running.tokens)]
    assert harness.ask(PROMPT).tokens == cold(PROMPT)
    for path, cells in blocks_of(harness).items():
        assert path[:2] != (500, 501) or cells == blocks_of_cold(path)[path]


def blocks_of_cold(path: tuple[int, ...]) -> dict[tuple[int, ...], bytes | None]:
    harness = RuntimeHarness(engine())
    harness.ask(list(path), max_tokens=1)
    harness.offload()
    return blocks_of(harness)
