"""One judgement of hit, partial hit or miss, whoever asks."""

from __future__ import annotations

from typing import Any

import pytest

from rekindle.protocol.events import Reason
from rekindle.runtime.report import Comparison, Evidence, judge

PROMPT, FIRST_MESSAGE = 100, 20


def evidence(**known: Any) -> Evidence:
    usual: dict[str, Any] = {
        "prompt_tokens": PROMPT,
        "first_message_tokens": FIRST_MESSAGE,
        "reused_tokens": 80,
        "matched_tokens": 80,
        "diverged": False,
        "changed": Reason.TURN_CHANGED,
    }
    return Evidence(**{**usual, **known})


def entry(common_tokens: int = 80, **known: Any) -> Comparison:
    usual: dict[str, Any] = {"covers": True, "reason": Reason.FULL_MATCH}
    return Comparison(common_tokens=common_tokens, **{**usual, **known})


NOTHING = {"reused_tokens": 0, "matched_tokens": 0}
PART = {"reused_tokens": 40, "matched_tokens": 40}


@pytest.mark.parametrize(
    ("known", "verdict"),
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
def test_without_a_name_what_was_found_decides(
    known: dict[str, Any], verdict: tuple[str, Reason]
) -> None:
    assert judge(evidence(**known)) == verdict


@pytest.mark.parametrize(
    ("named", "known", "verdict"),
    [
        (entry(), {}, ("hit", Reason.FULL_MATCH)),
        (entry(81), {}, ("hit", Reason.FULL_MATCH)),  # the last token of a reply is not computed
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
def test_with_a_name_the_entry_decides(
    named: Comparison, known: dict[str, Any], verdict: tuple[str, Reason]
) -> None:
    assert judge(evidence(named=named, **known)) == verdict


@pytest.mark.parametrize("reason", [Reason.CACHE_KEY_NOT_FOUND, Reason.EXPIRED])
def test_a_key_that_stands_for_nothing_is_a_miss_whatever_was_reused(reason: Reason) -> None:
    assert judge(evidence(problem=reason)) == ("miss", reason)


@pytest.mark.parametrize("named", [None, entry(covers=False, reason=Reason.SYSTEM_CHANGED)])
def test_less_than_one_whole_message_is_a_miss(named: Comparison | None) -> None:
    few = {"reused_tokens": FIRST_MESSAGE - 1, "matched_tokens": FIRST_MESSAGE - 1}
    found = evidence(named=named, diverged=True, changed=Reason.SYSTEM_CHANGED, **few)
    assert judge(found) == ("miss", Reason.SYSTEM_CHANGED)
    whole = {"reused_tokens": FIRST_MESSAGE, "matched_tokens": FIRST_MESSAGE}
    assert judge(evidence(named=named, diverged=True, **whole)).status == "partial_hit"


def test_a_prompt_without_messages_counts_every_token() -> None:
    one = {"reused_tokens": 1, "matched_tokens": 1, "first_message_tokens": 0}
    assert judge(evidence(diverged=True, **one)).status == "partial_hit"
