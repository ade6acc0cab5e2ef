"""State that cannot be cut: turns go on from checkpoints, and answer as if they had not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rekindle.chat.encode import Prompt
from rekindle.chat.message_spans import MessageSpan
from rekindle.errors import EngineBroken
from rekindle.kvcache.block import chain
from rekindle.kvcache.tiers.ram import RamTier
from rekindle.protocol.admin import DeleteEntry, Validate
from rekindle.protocol.requests import Names, Prepare
from rekindle.runtime.checkpoints import LEAST_INTERVAL_TOKENS, Checkpoints, interval_tokens
from rekindle.tokens import Tokens
from tests.support.fake import CELL_BYTES, CHECKPOINT_BYTES, FakeEngine
from tests.support.harness import Desk, Reply

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
    return Desk(engine()).ask(tokens, **ask).tokens


def went_on(reply: Reply) -> list[int]:
    """All that its sequence held at its end."""
    return reply.turn.tokens[:-1]  # the last token was sampled, not computed


def test_the_next_turn_computes_what_is_new_alone() -> None:
    desk = Desk(engine())
    first = desk.ask(CHAT)
    longer = [*went_on(first), 1, 2, 3]
    second = desk.ask(longer)
    assert second.reused == len(went_on(first))
    assert second.tokens == cold(longer)


def test_twenty_turns_compute_each_token_once() -> None:
    fake = engine(context_tokens=2048)
    desk = Desk(fake)
    tokens = list(PROMPT)
    for turn in range(20):
        reply = desk.ask(tokens)
        tokens = [*went_on(reply), 300 + turn, 301 + turn]
    assert fake.counts.computed_tokens == len(tokens) - 2


def test_a_reply_that_is_not_sent_back_as_it_was_resumes_at_the_end_of_the_prompt() -> None:
    """Reasoning that a template drops, words that it writes only in front of a reply."""
    desk = Desk(engine())
    desk.ask(CHAT)
    edited = [*PROMPT[:92], 11, 12, 13, 14]
    again = desk.ask(edited)
    assert again.reused == 92
    assert again.tokens == cold(edited)


def test_another_user_message_resumes_after_the_system_prompt() -> None:
    desk = Desk(engine())
    desk.ask(CHAT)
    other = desk.ask([*SYSTEM, *HEADER, 9, 9, 9])
    assert other.reused == len(SYSTEM) + len(HEADER)


def test_conversations_that_part_where_nothing_was_kept_part_there_once() -> None:
    """The second pays, and leaves a checkpoint for the third."""
    desk = Desk(engine())
    desk.ask(PROMPT)
    reused = [desk.ask([*PROMPT[:70], branch, branch, branch]).reused for branch in (1, 2, 3)]
    assert reused[0] < 70
    assert reused[1:] == [70, 70]


def test_followers_wait_and_share_what_the_leader_computes() -> None:
    fake = engine()
    desk = Desk(fake)
    replies = [desk.submit([*PROMPT, branch, branch], max_tokens=1) for branch in range(4)]
    desk.run()
    assert fake.counts.computed_tokens == len(PROMPT) + 4 * 2
    assert [reply.reused for reply in replies] == [0, *[len(PROMPT)] * 3]


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("tier", ["ram", "disk", "restart"])
def test_every_tier_gives_checkpoints_back(tmp_path: Path, tier: str, exact: bool) -> None:
    ram_bytes = 8_000 if tier == "disk" else 1 << 30
    desk = Desk(engine(), folder=tmp_path, resident_tokens=0, ram_bytes=ram_bytes)
    first = desk.ask(CHAT, exact=exact)
    desk.settle()
    if tier == "disk":
        desk.store.write_everything()
        desk.flush()
        desk.ask(list(range(500, 600)))  # takes the room
    if tier == "restart":
        desk.close()
        desk = Desk(engine(), folder=tmp_path, resident_tokens=0)
    longer = [*went_on(first), 1, 2, 3]
    second = desk.ask(longer, exact=exact)
    desk.close()
    assert second.tokens == cold(longer, exact=True)
    assert second.reused == (80 if exact else len(went_on(first)))
    assert second.finished.cache.tier == ("ram" if tier == "ram" else "disk")


def test_exact_turns_take_whole_steps_only() -> None:
    desk = Desk(engine())
    desk.ask(CHAT)  # leaves checkpoints, but not of canonical steps
    assert desk.ask(CHAT, exact=True).reused == 0
    assert desk.ask(CHAT, exact=True).reused == 80


def test_checkpoints_stay_within_the_budget() -> None:
    desk = Desk(engine(context_tokens=2048), ram_bytes=30_000)
    for number in range(30):
        desk.ask([number, *range(100, 300)])
        desk.settle()
        assert desk.store.tiers[0].used_bytes <= 30_000


def test_a_prepared_prompt_is_resumed_at_its_very_end() -> None:
    desk = Desk(engine())
    prepared = desk.ask(PROMPT, prepare=Prepare(pinned=True, ttl_s=None))
    key = prepared.finished.cache.new_cache_key
    assert key is not None
    turn = desk.ask([*PROMPT, 1, 2], names=Names(cache_key=key))
    assert turn.reused == len(PROMPT)
    assert turn.finished.cache.status == "hit"


def test_a_block_that_lost_its_checkpoint_is_a_miss_and_not_an_answer() -> None:
    desk = Desk(engine())
    first = desk.ask(CHAT)
    for block in desk.store:
        if block.resumable and (blob := desk.store.get(block)):
            desk.store.tiers[0].put(block, blob[:-CHECKPOINT_BYTES])
    longer = [*went_on(first), 1]
    assert desk.ask(longer).tokens == cold(longer)


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
    assert interval == LEAST_INTERVAL_TOKENS
    long = said([5] * 2000, ("user", 0, 1998))
    assert places(long) == [512, 1024, 1536, 1998]


# -- when things go wrong ------------------------------------------------------------------------


def blocks_of(desk: Desk) -> dict[tuple[int, ...], bytes | None]:
    """What the store holds: the tokens up to each block's end, and its cells."""
    found = {}
    for block in desk.store:
        path = [token for each in reversed(list(chain(block))) for token in each.tokens]
        blob = desk.store.get(block)
        found[tuple(path)] = bytes(blob)[: len(block.tokens) * CELL_BYTES] if blob else None
    return found


def test_a_store_that_was_full_for_a_while_is_given_no_block_in_a_wrong_place() -> None:
    """The first checkpoint finds no room; then there is some, and another turn keeps the block that
    was refused. What the turn keeps later must not be put under that one."""
    fake = engine(batch_tokens=16)
    desk = Desk(fake)
    long = list(range(100, 300))
    turn = desk.submit(said(long, ("system", 0, 20), ("user", 22, 180)), max_tokens=4)
    ram = desk.store.tiers[0]
    assert isinstance(ram, RamTier)
    limit, ram.limit_bytes = ram.limit_bytes, 0
    while turn.turn.held_tokens < 22:
        desk.scheduler.step()
    ram.limit_bytes = limit
    other = desk.submit([*long[:30], 1, 2, 3], max_tokens=1, exact=True)
    desk.run(other, turn)
    desk.settle()
    right = Desk(engine())
    for path, cells in blocks_of(desk).items():
        right.ask(list(path), max_tokens=1)
        right.settle()
        assert blocks_of(right)[path] == cells


def test_a_turn_whose_earlier_blocks_were_evicted_still_keeps_its_end() -> None:
    fake = engine(batch_tokens=16)
    desk = Desk(fake, resident_tokens=0)
    reply = desk.submit(CHAT, max_tokens=40)
    while reply.turn.generated_tokens < 20:
        desk.scheduler.step()
    for block in list(desk.store):
        desk.store.drop(block)
    desk.run(reply)
    longer = [*went_on(reply), 1, 2, 3]
    assert desk.ask(longer).reused == len(went_on(reply))


def test_turns_that_ended_together_stay_ended_when_keeping_the_first_breaks_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = engine()
    desk = Desk(fake, resident_tokens=0)
    replies = [desk.submit([n, *range(100, 120)], max_tokens=3) for n in range(3)]
    while not all(reply.turn.generated_tokens == 2 for reply in replies):
        desk.scheduler.step()

    def broken(*_args: object, **_options: object) -> bytes:
        fake.reset()
        raise EngineBroken("export failed")

    with monkeypatch.context() as patch:
        patch.setattr(fake, "export", broken)
        desk.scheduler.step()
    assert all(reply.ended for reply in replies)
    assert desk.scheduler.turns == 0
    assert desk.ask(PROMPT).tokens == cold(PROMPT)


def test_a_corrupt_checkpoint_on_disk_costs_no_more_than_what_is_behind_the_one_before(
    tmp_path: Path,
) -> None:
    desk = Desk(engine(), folder=tmp_path, resident_tokens=0)
    first = desk.ask(CHAT)
    desk.close()
    desk = Desk(engine(), folder=tmp_path, resident_tokens=0)
    longer = [*went_on(first), 1, 2, 3]
    newest = next(desk.store.checkpoints(desk.root(), Tokens.of(longer)))
    assert desk.disk is not None
    file = desk.disk.folder.path / "blocks" / newest.key.hex()
    file.write_bytes(file.read_bytes()[:-1])
    second = desk.ask(longer)
    desk.close()
    assert second.tokens == cold(longer)
    assert second.reused == 92
    assert second.finished.cache.reason == "corrupt"


def test_choices_of_one_prompt_share_its_cells() -> None:
    fake = engine()
    desk = Desk(fake)
    replies = [desk.submit(PROMPT, max_tokens=30) for _ in range(4)]
    while not all(reply.started for reply in replies):
        desk.scheduler.step()
    assert fake.pool_tokens - fake.free_tokens < 2 * len(PROMPT)
    desk.run()
    assert fake.counts.computed_tokens == len(PROMPT) - 1 + 4 * 30
    assert {tuple(reply.tokens) for reply in replies} == {tuple(cold(PROMPT, max_tokens=30))}


def test_a_question_beforehand_says_what_is_short_of_a_checkpoint() -> None:
    """All the state is there, but none to go on from at the end of what is asked about."""
    desk = Desk(engine(), resident_tokens=0)
    first = desk.ask(CHAT, names=Names(return_cache_key=True))
    key = first.finished.cache.new_cache_key
    assert key is not None
    longer = [*first.turn.tokens, 1, 2, 3]
    for block in list(desk.store):
        if block.stop == len(went_on(first)):
            desk.store.drop(block)
    desk.ask([*longer, *range(40, 60)])
    for block in desk.store:
        if block.resumable and block.stop > 92:
            block.resumable = False
    told = desk.queries.validate(
        Validate(cache_key=key, messages=[]), desk.root(), Prompt(Tokens.of(longer))
    )
    assert (told.status, told.reason, told.reusable_tokens) == (
        "partial_hit",
        "checkpoint_boundary",
        92,
    )


def test_what_an_entry_holds_is_what_a_turn_could_go_on_from(tmp_path: Path) -> None:
    """Not the cells of its tokens in another's longer block."""
    desk = Desk(engine(), folder=tmp_path, resident_tokens=0)
    prepared = desk.ask(PROMPT, prepare=Prepare(pinned=False, ttl_s=None))
    desk.ask([*PROMPT, *range(40, 60)])
    [entry] = [e for e in desk.entries.of(None) if e.key == prepared.finished.cache.new_cache_key]
    assert desk.queries.info(entry).held_tokens == len(PROMPT)
    desk.flush()
    assert desk.queries.info(entry).stored_tokens == 0  # whole blocks are; no checkpoint is
    desk.store.write_everything()
    desk.flush()
    assert desk.queries.info(entry).stored_tokens == len(PROMPT)
    for block in list(desk.store):
        if block.stop == len(PROMPT):
            desk.store.drop(block)
    assert desk.queries.info(entry).held_tokens == len(PROMPT) - 1
    desk.close()


@pytest.mark.parametrize("question", ["settle", "delete"])
@pytest.mark.parametrize("then", ["go on", "give up"])
def test_an_engine_that_breaks_over_a_question_loses_no_turn(
    monkeypatch: pytest.MonkeyPatch, question: str, then: str
) -> None:
    """What is idle is kept before the answer; turns that run have lost their sequences, too."""
    fake = engine()
    desk = Desk(fake)
    first = desk.ask(PROMPT, names=Names(return_cache_key=True))
    desk.ask([*first.turn.tokens, 5, 6, 7], max_tokens=2)
    key = first.finished.cache.new_cache_key
    assert key is not None
    running = desk.submit(list(range(500, 560)), max_tokens=20)
    while running.turn.generated_tokens < 5:
        desk.scheduler.step()

    def broken(*_args: object, **_options: object) -> bytes:
        fake.reset()
        raise EngineBroken("export failed")

    with monkeypatch.context() as patch:
        patch.setattr(fake, "export", broken)
        if question == "settle":
            desk.queries.settle(key, desk.root(), lambda _info: None)
        else:
            desk.queries.answer(DeleteEntry(key), desk.root(), admin=False)
    if then == "give up":
        desk.cancel(running)
    desk.run(running)
    expected = cold(list(range(500, 560)), max_tokens=20)
    assert running.tokens == expected[: len(running.tokens)]
    assert desk.ask(PROMPT).tokens == cold(PROMPT)
    for path, cells in blocks_of(desk).items():
        assert path[:2] != (500, 501) or cells == blocks_of_cold(path)[path]


def blocks_of_cold(path: tuple[int, ...]) -> dict[tuple[int, ...], bytes | None]:
    desk = Desk(engine())
    desk.ask(list(path), max_tokens=1)
    desk.settle()
    return blocks_of(desk)
