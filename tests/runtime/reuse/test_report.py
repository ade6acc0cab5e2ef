"""Turns and `validate` share one classification: hit, partial hit or miss."""

from __future__ import annotations

from typing import Any

import pytest

from rekindle.chat.prompt import MessageSpan, Prompt
from rekindle.protocol.events import Reason
from rekindle.protocol.requests import Names
from rekindle.runtime.reuse.report import Comparison, ReuseInputs, classify, first_message_tokens
from rekindle.tokens import Tokens
from tests.support.fake import FakeEngine
from tests.support.harness import RuntimeHarness

PROMPT, FIRST_MESSAGE = 100, 20


def inputs(**known: Any) -> ReuseInputs:
    defaults: dict[str, Any] = {
        "prompt_tokens": PROMPT,
        "first_message_tokens": FIRST_MESSAGE,
        "reused_tokens": 80,
        "matched_tokens": 80,
        "diverged": False,
        "changed": Reason.TURN_CHANGED,
    }
    return ReuseInputs(**{**defaults, **known})


def entry(common_tokens: int = 80, **known: Any) -> Comparison:
    defaults: dict[str, Any] = {"covers": True, "reason": Reason.FULL_MATCH}
    return Comparison(common_tokens=common_tokens, **{**defaults, **known})


NOTHING = {"reused_tokens": 0, "matched_tokens": 0}
PART = {"reused_tokens": 40, "matched_tokens": 40}


@pytest.mark.parametrize(
    ("known", "outcome"),
    [
        ({}, ("hit", Reason.FULL_MATCH)),
        (NOTHING, ("miss", Reason.NOT_CACHED)),
        ({"reuse": False, **NOTHING}, ("miss", Reason.OPTED_OUT)),
        ({"diverged": True}, ("partial_hit", Reason.TURN_CHANGED)),
        ({"problem": Reason.CORRUPT, **PART}, ("partial_hit", Reason.CORRUPT)),
        ({"problem": Reason.CORRUPT, **NOTHING}, ("miss", Reason.CORRUPT)),
        ({"exact": True, "reused_tokens": 0}, ("miss", Reason.EXACT_BOUNDARY)),
        (
            {"can_truncate": False, "reused_tokens": 40},
            ("partial_hit", Reason.CHECKPOINT_BOUNDARY),
        ),
        ({"can_truncate": False, "reused_tokens": 0}, ("miss", Reason.CHECKPOINT_BOUNDARY)),
        ({"can_truncate": False}, ("hit", Reason.FULL_MATCH)),
    ],
)
def test_without_a_name_the_status_depends_on_the_state_that_was_found(
    known: dict[str, Any], outcome: tuple[str, Reason]
) -> None:
    assert classify(inputs(**known)) == outcome


@pytest.mark.parametrize(
    ("named", "known", "outcome"),
    [
        (entry(), {}, ("hit", Reason.FULL_MATCH)),
        (entry(81), {}, ("hit", Reason.FULL_MATCH)),  # the last token of a reply has no KV state
        (entry(), PART, ("partial_hit", Reason.EVICTED)),
        (entry(was_computed=False), NOTHING, ("miss", Reason.NOT_CACHED)),
        (entry(), {"exact": True, **PART}, ("partial_hit", Reason.EXACT_BOUNDARY)),
        (
            entry(),
            {"can_truncate": False, "reused_tokens": 40},
            ("partial_hit", Reason.CHECKPOINT_BOUNDARY),
        ),
        (
            entry(covers=False, reason=Reason.SYSTEM_CHANGED),
            {},
            ("partial_hit", Reason.SYSTEM_CHANGED),
        ),
        (
            entry(covers=False, reason=Reason.REQUEST_SHORTER),
            {"problem": Reason.CORRUPT, **PART},
            ("partial_hit", Reason.CORRUPT),
        ),
    ],
)
def test_with_a_name_the_status_depends_on_the_named_entry(
    named: Comparison, known: dict[str, Any], outcome: tuple[str, Reason]
) -> None:
    assert classify(inputs(named=named, **known)) == outcome


@pytest.mark.parametrize("reason", [Reason.CACHE_KEY_NOT_FOUND, Reason.EXPIRED])
def test_an_unknown_key_is_a_miss_even_if_tokens_were_reused(reason: Reason) -> None:
    assert classify(inputs(problem=reason)) == ("miss", reason)


@pytest.mark.parametrize("named", [None, entry(covers=False, reason=Reason.SYSTEM_CHANGED)])
def test_less_than_one_whole_message_is_a_miss(named: Comparison | None) -> None:
    few = {"reused_tokens": FIRST_MESSAGE - 1, "matched_tokens": FIRST_MESSAGE - 1}
    found = inputs(named=named, diverged=True, changed=Reason.SYSTEM_CHANGED, **few)
    assert classify(found) == ("miss", Reason.SYSTEM_CHANGED)
    whole = {"reused_tokens": FIRST_MESSAGE, "matched_tokens": FIRST_MESSAGE}
    assert classify(inputs(named=named, diverged=True, **whole)).status == "partial_hit"


def test_a_prompt_without_messages_counts_every_token() -> None:
    one = {"reused_tokens": 1, "matched_tokens": 1, "first_message_tokens": 0}
    assert classify(inputs(diverged=True, **one)).status == "partial_hit"


def test_a_hit_need_not_reuse_the_last_prompt_token() -> None:
    found = inputs(prompt_tokens=20, first_message_tokens=20, reused_tokens=19, matched_tokens=19)
    assert classify(found) == ("hit", Reason.FULL_MATCH)


def test_a_miss_is_never_called_a_full_match() -> None:
    few = {"reused_tokens": FIRST_MESSAGE - 1, "matched_tokens": FIRST_MESSAGE - 1}
    assert classify(inputs(**few)) == ("miss", Reason.NOT_CACHED)


def test_equal_state_without_a_checkpoint_is_not_called_evicted() -> None:
    known = {"can_truncate": False, "diverged": True, "reused_tokens": 40}
    assert classify(inputs(named=entry(), **known)).reason == Reason.CHECKPOINT_BOUNDARY


# -- the first whole message --

TOOLS = [{"type": "function", "function": {"name": "look"}}]


def prompt(*spans: MessageSpan, text: bytes = b"", known_tokens: int = 0) -> Prompt:
    return Prompt(Tokens.of(range(50)), spans, text, known_tokens)


def test_the_first_message_ends_at_its_span() -> None:
    spans = MessageSpan(0, "system", 20, 3), MessageSpan(1, "user", 30, 24)
    assert first_message_tokens(prompt(*spans), None) == 20
    assert first_message_tokens(prompt(), None) == 0


def test_tools_shown_before_all_messages_count_as_the_first_message() -> None:
    first = MessageSpan(0, "user", 30, 24, start_byte=10)
    assert first_message_tokens(prompt(first, text=b"tool: look user: hi"), TOOLS) == 24
    assert first_message_tokens(prompt(first, text=b"user......: look, hi"), TOOLS) == 30


def test_the_end_of_the_first_message_is_unknown_if_it_was_recalled() -> None:
    late = MessageSpan(3, "user", 48, 44)
    assert first_message_tokens(prompt(late, known_tokens=40), None) == 0
    assert (
        first_message_tokens(prompt(late), None) == 48
    )  # the template shows none of the earlier messages


def test_an_unknown_key_is_reported_even_if_the_session_is_known() -> None:
    harness = RuntimeHarness(FakeEngine())
    harness.ask([1, 2, 3, 4], names=Names(session_id="s"))
    report = harness.ask([1, 2, 3, 5], names=Names(session_id="s", cache_key="no")).finished.cache
    assert (report.status, report.reason) == ("miss", Reason.CACHE_KEY_NOT_FOUND)
    assert (report.cache_key, report.diverged_at) == (None, None)
