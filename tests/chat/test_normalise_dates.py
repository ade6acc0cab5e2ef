"""The `dates` normaliser removes the day from dates that agents announce, and from no others."""

from __future__ import annotations

from typing import Any

import pytest

from rekindle.chat.normalise import normalise, without_days

USER = {"role": "user", "content": "Today's date is 2026-11-16, and I was born today."}


def changed(content: Any, role: str = "system") -> Any:
    [message], found = without_days([{"role": role, "content": content}])
    assert found == (message["content"] != content)
    return message["content"]


@pytest.mark.parametrize(
    ("text", "without"),
    [
        ("  Today's date: Mon Nov 16 2026\n</env>", "  Today's date: Nov 2026\n</env>"),
        ("Today's date is 2026-11-16.", "Today's date is 2026-11."),
        (
            "Today's date is Monday, November 16, 2026 (as here)",
            "Today's date is November 2026 (as",
        ),
        ("Current date: 2026-11-16\nYou", "Current date: 2026-11\nYou"),
        ("<current_date>2026-11-16</current_date>", "<current_date>2026-11</current_date>"),
    ],
)
@pytest.mark.parametrize("role", ["system", "developer"])
def test_an_announced_day_becomes_its_month(text: str, without: str, role: str) -> None:
    assert without in changed(text, role)
    parts = [{"type": "text", "text": "First."}, {"type": "text", "text": text}]
    assert without in changed(parts, role)[1]["text"]


@pytest.mark.parametrize(
    "context",
    [
        "<environment_context>\n  <current_date>{}</current_date>\n</environment_context>",
        "<system-reminder>\nToday's date is {}.\n</system-reminder>",
    ],
)
def test_dates_are_shortened_in_an_agents_context_but_not_in_the_users_words(
    context: str,
) -> None:
    said = "\nToday's date is 2026-11-16, they say."
    expected = context.format("2026-11") + said
    assert changed(context.format("2026-11-16") + said, "user") == expected
    parts = [{"type": "text", "text": context.format("2026-11-16")}, {"type": "image_url"}]
    assert changed(parts, "user")[0]["text"] == context.format("2026-11")


@pytest.mark.parametrize(
    "content",
    [
        None,
        "",
        [],
        "2026-11-16",
        "Due date: 2026-11-16",
        "Today's date: soon",
        "Today's date is 2026-11-161",
        "Today's date is " * 20_000,
        "Today's date is " + "November" * 20_000,
    ],
)
def test_text_that_announces_no_day_stays_unchanged(content: Any) -> None:
    assert changed(content) == content


def test_messages_after_the_first_reply_stay_unchanged() -> None:
    later = [USER, {"role": "assistant", "content": "Hm."}, {**USER, "role": "system"}]
    assert without_days(later) == (later, False)


def test_the_normaliser_is_off_by_default() -> None:
    messages = [{"role": "system", "content": "Today's date is 2026-11-16"}, USER]
    assert normalise(messages, None).messages == messages
    normalised = normalise(messages, None, ["dates"])
    assert normalised.messages == [{"role": "system", "content": "Today's date is 2026-11"}, USER]
    assert normalised.changes == ["dates"]
