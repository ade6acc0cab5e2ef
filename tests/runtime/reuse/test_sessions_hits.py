"""Each turn that reuses state counts as a hit of exactly one entry, and no hit is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from rekindle.protocol.admin import EntryList, GetStats, ListEntries, Stats
from rekindle.protocol.requests import Names, Prepare
from tests.support.fake import FakeEngine, NumberTokenizer
from tests.support.harness import Reply, RuntimeHarness

PROMPT = "".join(f"{token} " for token in range(100, 140))
OTHER = "".join(f"{token} " for token in range(200, 240))


class Words(NumberTokenizer):
    """Tokenises words; a word that is not a number becomes token 0."""

    def encode(self, text: str, *, special: bool) -> list[int]:
        return [int(word) if word.isdigit() else 0 for word in text.split()]


def open_harness(folder: Path | None = None) -> RuntimeHarness:
    engine = FakeEngine()
    engine.tokenizer = Words()
    return RuntimeHarness(engine, folder=folder)


@pytest.fixture
def harness() -> RuntimeHarness:
    return open_harness()


def converse(harness: RuntimeHarness, prompt: str, turns: int, names: Names | None = None) -> Reply:
    for number in range(turns):
        reply = harness.ask_text(prompt, names=names)
        prompt = f"{prompt}{reply.text}{number} "
    return reply


def hits(harness: RuntimeHarness) -> list[int]:
    listed = harness.administer(ListEntries())
    assert isinstance(listed, EntryList)
    return sorted(entry.hit_count for entry in listed.entries)


def stats(harness: RuntimeHarness) -> Stats:
    found = harness.administer(GetStats(), admin=True)
    assert isinstance(found, Stats)
    return found


@pytest.mark.parametrize("names", [None, Names(session_id="s"), Names(prompt_cache_key="p")])
def test_a_conversation_has_one_hit_per_turn_after_its_first(
    harness: RuntimeHarness, names: Names | None
) -> None:
    converse(harness, PROMPT, 5, names)
    assert hits(harness) == [4]


def test_the_hits_of_all_entries_add_up_to_the_number_of_hits(harness: RuntimeHarness) -> None:
    converse(harness, PROMPT, 3)
    converse(harness, OTHER, 4, Names(session_id="s"))
    harness.ask_text(PROMPT)  # the same question again
    harness.ask_text(f"{PROMPT}7 8 9 ")  # another question with the same prefix
    found = stats(harness)
    assert sum(hits(harness)) == found.hits + found.partial_hits == 7


def test_a_prepared_prompt_is_hit_by_conversations_that_start_with_it(
    harness: RuntimeHarness,
) -> None:
    harness.ask(
        list(range(100, 140)), prepare=Prepare()
    )  # preparing counts as neither hit nor miss
    [prepared] = harness.entries.of(harness.namespace())
    for more in ("1 ", "2 3 "):
        harness.ask_text(PROMPT + more, names=Names(cache_key=prepared.key))
    assert prepared.hits == 2


def test_a_miss_counts_no_hit(harness: RuntimeHarness) -> None:
    harness.ask_text(PROMPT, names=Names(session_id="s"))
    harness.ask_text(OTHER, names=Names(session_id="s"))
    assert hits(harness) == [0]


def test_a_turn_that_opts_out_counts_no_hit(harness: RuntimeHarness) -> None:
    reply = harness.ask_text(PROMPT)
    harness.ask_text(PROMPT + reply.text, reuse=False)
    assert hits(harness) == [0]


def test_turns_of_another_tenant_count_no_hits(harness: RuntimeHarness) -> None:
    converse(harness, PROMPT, 2)
    harness.ask_text(PROMPT, salt=b"other")
    assert hits(harness) == [1]


def test_hits_survive_a_restart(tmp_path: Path) -> None:
    before = open_harness(tmp_path)
    converse(before, PROMPT, 3)
    before.close()
    after = open_harness(tmp_path)
    assert hits(after) == [2]
    after.close()


def test_stats_show_how_many_turns_are_waiting_and_running(harness: RuntimeHarness) -> None:
    harness.submit([1, 2, 3])
    assert stats(harness).active_turns == 1
    harness.run()
    assert stats(harness).active_turns == 0
