"""State that cannot be cut: turns go on from checkpoints, and answer as if they had not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rekindle.prompt.tokens import Boundary, Prompt
from rekindle.runtime.checkpoints import LEAST_INTERVAL_TOKENS, Checkpoints, interval_tokens
from rekindle.runtime.wire import Naming, Preparing
from tests.support.desk import Desk, Reply
from tests.support.fake import CHECKPOINT_BYTES, FakeEngine

SYSTEM = list(range(100, 160))
USER = list(range(200, 230))
HEADER = [7, 8]  # what a template writes after each message
PROMPT = [*SYSTEM, *HEADER, *USER, *HEADER]


def engine(**options: Any) -> FakeEngine:
    return FakeEngine(can_cut=False, **options)


def said(tokens: list[int], *messages: tuple[str, int, int]) -> Prompt:
    """A prompt whose messages are (role, start, end)."""
    ends = (Boundary(at, role, end, start) for at, (role, start, end) in enumerate(messages))
    return Prompt(tuple(tokens), tuple(ends))


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


def test_a_client_that_gives_up_five_times_computes_each_token_once() -> None:
    fake = engine(batch_tokens=16)
    desk = Desk(fake)
    prompt = list(range(100, 400))
    for steps in (2, 3, 4, 5, 6):
        reply = desk.submit(prompt)
        for _ in range(steps):
            desk.scheduler.step()
        desk.cancel(reply)
    last = desk.ask(prompt, max_tokens=1)
    assert last.tokens == cold(prompt, max_tokens=1)
    assert fake.counts.computed_tokens == len(prompt)


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
        assert desk.store.used_bytes <= 30_000


def test_a_prepared_prompt_is_resumed_at_its_very_end() -> None:
    desk = Desk(engine())
    prepared = desk.ask(PROMPT, preparing=Preparing(pinned=True, ttl_s=None))
    key = prepared.finished.cache.new_cache_key
    assert key is not None
    turn = desk.ask([*PROMPT, 1, 2], naming=Naming(cache_key=key))
    assert turn.reused == len(PROMPT)
    assert turn.finished.cache.status == "hit"


def test_a_block_that_lost_its_checkpoint_is_a_miss_and_not_an_answer() -> None:
    desk = Desk(engine())
    first = desk.ask(CHAT)
    for block in desk.store:
        if block.resumable and (blob := desk.store.get(block)):
            desk.store._ram.put(block, blob[:-CHECKPOINT_BYTES])
    longer = [*went_on(first), 1]
    assert desk.ask(longer).tokens == cold(longer)


# -- where they are taken ------------------------------------------------------------------------


def places(prompt: Prompt, *, exact: bool = False, held: int = 0) -> list[int]:
    taken = Checkpoints(prompt, engine().abilities, exact=exact, held=held)
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
    interval = interval_tokens(engine().abilities)
    assert interval == LEAST_INTERVAL_TOKENS
    long = said([5] * 2000, ("user", 0, 1998))
    assert places(long) == [512, 1024, 1536, 1998]
