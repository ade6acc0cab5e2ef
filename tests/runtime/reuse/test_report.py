"""Turns and `validate` share one classification: hit, partial hit or miss."""

from __future__ import annotations

from typing import Any

import pytest

from rekindle.chat.prompt import MessageSpan, Prompt
from rekindle.protocol.events import CacheReport, Reason
from rekindle.protocol.requests import Names
from rekindle.runtime.reuse.report import Comparison, ReuseInputs, classify, opening_tokens
from rekindle.tokens import Tokens
from tests.support.fake import AsciiTokenizer, FakeEngine
from tests.support.harness import RuntimeHarness

PROMPT, OPENING = 100, 5


def inputs(**known: Any) -> ReuseInputs:
    defaults: dict[str, Any] = {
        "prompt_tokens": PROMPT,
        "opening_tokens": OPENING,
        "reused_tokens": 80,
        "matched_tokens": 80,
        "diverged": False,
        "changed": Reason.TURN_CHANGED,
    }
    return ReuseInputs(**{**defaults, **known})


def entry(common_tokens: int = 80, **known: Any) -> Comparison:
    defaults: dict[str, Any] = {"covers": True, "reason": Reason.FULL_MATCH}
    return Comparison(common_tokens=common_tokens, **{**defaults, **known})


def changed(reason: Reason, common_tokens: int = 80) -> Comparison:
    return entry(common_tokens, covers=False, diverges=True, reason=reason)


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
    ("compared", "known", "outcome"),
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
        (changed(Reason.SYSTEM_CHANGED), {}, ("partial_hit", Reason.SYSTEM_CHANGED)),
        (changed(Reason.TOOLS_CHANGED), {}, ("partial_hit", Reason.TOOLS_CHANGED)),
        (
            entry(PROMPT, covers=False, reason=Reason.REQUEST_SHORTER),
            {"reused_tokens": PROMPT - 1, "matched_tokens": PROMPT - 1},
            ("hit", Reason.REQUEST_SHORTER),
        ),
        (
            entry(covers=False, reason=Reason.REQUEST_SHORTER),
            {"problem": Reason.CORRUPT, **PART},
            ("partial_hit", Reason.CORRUPT),
        ),
    ],
)
@pytest.mark.parametrize("how", ["named", "nearest"])
def test_a_conversation_is_compared_alike_with_and_without_a_name(
    how: str, compared: Comparison, known: dict[str, Any], outcome: tuple[str, Reason]
) -> None:
    assert classify(inputs(**{how: compared}, **known)) == outcome


@pytest.mark.parametrize("reason", [Reason.CACHE_KEY_NOT_FOUND, Reason.EXPIRED])
def test_a_wrong_key_decides_the_reason_and_tokens_the_status(reason: Reason) -> None:
    assert classify(inputs(problem=reason)) == ("hit", reason)
    assert classify(inputs(problem=reason, nearest=entry())) == ("hit", reason)
    edited = changed(Reason.TURN_CHANGED, 40)
    assert classify(inputs(problem=reason, nearest=edited, **PART)) == ("partial_hit", reason)
    assert classify(inputs(problem=reason, **NOTHING)) == ("miss", reason)


@pytest.mark.parametrize("how", ["named", "nearest"])
def test_one_token_of_content_is_a_partial_hit_and_the_opening_alone_is_a_miss(how: str) -> None:
    for reused, status in ((OPENING, "miss"), (OPENING + 1, "partial_hit")):
        few = {"reused_tokens": reused, "matched_tokens": reused}
        found = inputs(**{how: changed(Reason.SYSTEM_CHANGED, reused)}, diverged=True, **few)
        assert classify(found) == (status, Reason.SYSTEM_CHANGED)


def test_state_of_another_conversation_than_the_named_one_is_a_hit_too() -> None:
    """The reason still tells that the named conversation is another one."""
    named = changed(Reason.SYSTEM_CHANGED, OPENING)
    assert classify(inputs(named=named)) == ("hit", Reason.SYSTEM_CHANGED)
    assert classify(inputs(named=named, diverged=True)).status == "partial_hit"


def test_state_that_matches_more_than_the_nearest_conversation_explains_itself() -> None:
    nearest = changed(Reason.SYSTEM_CHANGED, OPENING)
    assert classify(inputs(nearest=nearest)) == ("hit", Reason.FULL_MATCH)


def test_a_prompt_without_messages_counts_every_token() -> None:
    one = {"reused_tokens": 1, "matched_tokens": 1, "opening_tokens": 0}
    assert classify(inputs(diverged=True, **one)).status == "partial_hit"


def test_a_hit_need_not_reuse_the_last_prompt_token() -> None:
    found = inputs(prompt_tokens=20, reused_tokens=19, matched_tokens=19)
    assert classify(found) == ("hit", Reason.FULL_MATCH)


def test_a_miss_is_never_called_a_full_match() -> None:
    few = {"reused_tokens": OPENING, "matched_tokens": OPENING}
    assert classify(inputs(**few)) == ("miss", Reason.NOT_CACHED)


def test_equal_state_without_a_checkpoint_is_not_called_evicted() -> None:
    known = {"can_truncate": False, "diverged": True, "reused_tokens": 40}
    assert classify(inputs(named=entry(), **known)).reason == Reason.CHECKPOINT_BOUNDARY


# -- the tokens of the template before all content --

TOOLS = [{"type": "function", "function": {"name": "look"}}]


def prompt(*spans: MessageSpan, text: bytes = b"", known_tokens: int = 0) -> Prompt:
    return Prompt(Tokens.of(text or range(50)), spans, text, known_tokens)


def opening(prompt: Prompt, tools: list[dict[str, Any]] | None = None) -> int:
    return opening_tokens(prompt, tools, AsciiTokenizer())


def test_the_opening_ends_where_the_first_message_begins() -> None:
    spans = MessageSpan(0, "system", 20, 3), MessageSpan(1, "user", 30, 24)
    assert opening(prompt(*spans)) == 3
    assert opening(prompt()) == 0


def test_the_opening_ends_at_the_first_tool_if_tools_come_first() -> None:
    text = b"tool: look user: hi"
    first = MessageSpan(0, "user", 19, 17, start_byte=17)
    assert opening(prompt(first, text=text), TOOLS) == len(b"tool: ")
    assert opening(prompt(first, text=b"user...........: look"), TOOLS) == 17


def test_the_opening_is_unknown_if_the_first_message_was_recalled() -> None:
    late = MessageSpan(3, "user", 48, 44)
    assert opening(prompt(late, known_tokens=40)) == 0
    assert opening(prompt(late)) == 44  # the template shows none of the earlier messages


# -- whole turns --

SYSTEM = {"role": "system", "content": "Answer in one word. " * 4}
CALLER = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
OTHER = {"type": "function", "function": {"name": "wait", "parameters": {"type": "object"}}}
TALK = [SYSTEM, {"role": "user", "content": "What colour is the sky?"}]


def chatting() -> RuntimeHarness:
    engine = FakeEngine(chat_template=TOOL_TEMPLATE, context_tokens=2048, pool_tokens=8192)
    engine.tokenizer = AsciiTokenizer()
    return RuntimeHarness(engine)


TOOL_TEMPLATE = """{% for m in messages %}<{{ m.role }}>{% if loop.first and tools %}\
{{ tools | tojson }}{% endif %}{{ m.content }}
{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""


def report(harness: RuntimeHarness, messages: list[dict[str, Any]], **ask: Any) -> CacheReport:
    return harness.ask_chat(messages, **ask).finished.cache


@pytest.mark.parametrize(
    ("messages", "tools", "reason"),
    [
        ([{**SYSTEM, "content": "Be kind."}, TALK[1]], CALLER, Reason.SYSTEM_CHANGED),
        (TALK, [*CALLER, OTHER], Reason.TOOLS_CHANGED),
        ([SYSTEM, {"role": "user", "content": "What is rain?"}], CALLER, Reason.TURN_CHANGED),
        (TALK, CALLER, Reason.FULL_MATCH),
    ],
)
def test_the_same_change_has_the_same_reason_with_and_without_a_name(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]], reason: Reason
) -> None:
    for names in (Names(session_id="s"), None):
        harness = chatting()
        report(harness, TALK, tools=CALLER, names=Names(session_id="s"))
        found = report(harness, messages, tools=tools, names=names)
        assert found.reason == reason
        assert found.status == ("hit" if reason is Reason.FULL_MATCH else "partial_hit")


def test_an_unknown_key_is_echoed_and_the_tokens_are_a_hit_all_the_same() -> None:
    harness = chatting()
    report(harness, TALK)
    found = report(harness, TALK, names=Names(cache_key="no"))
    assert (found.status, found.reason) == ("hit", Reason.CACHE_KEY_NOT_FOUND)
    assert (found.cache_key, found.diverged_at) == ("no", None)
    new = report(harness, [{"role": "user", "content": "?"}], names=Names(cache_key="no"))
    assert (new.status, new.reason) == ("miss", Reason.CACHE_KEY_NOT_FOUND)


def test_dropping_later_turns_is_a_hit_that_tells_so_with_and_without_a_name() -> None:
    for names in (Names(session_id="s"), None):
        harness = chatting()
        said = harness.ask_chat(TALK, names=Names(session_id="s")).message
        more = {"role": "user", "content": "And now?"}
        report(harness, [*TALK, said, more], names=Names(session_id="s"))
        found = report(harness, TALK, names=names)
        assert (found.status, found.reason) == ("hit", Reason.REQUEST_SHORTER)


def test_an_unknown_key_is_reported_even_if_the_session_is_known() -> None:
    harness = RuntimeHarness(FakeEngine())
    harness.ask([1, 2, 3, 4], names=Names(session_id="s"))
    report = harness.ask([1, 2, 3, 5], names=Names(session_id="s", cache_key="no")).finished.cache
    assert (report.status, report.reason) == ("hit", Reason.CACHE_KEY_NOT_FOUND)
    assert (report.cache_key, report.diverged_at) == ("no", None)
