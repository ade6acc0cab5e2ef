"""Words by which a tenant recognises an entry, and nobody else reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rekindle.protocol.admin import EntryInfo, EntryList, ListEntries, ShowEntry
from tests.chat.templates import CHATML
from tests.support.conversations import Conversations

ASKED = [{"role": "user", "content": "What is the moon made of?"}]


def held(talks: Conversations) -> None:
    talks.answer(talks.begin(ASKED, salt=b"one"), "Of cheese.")


def previews(talks: Conversations, **asking: Any) -> list[str]:
    listed = talks.administer(ListEntries(), **asking)
    assert isinstance(listed, EntryList)
    shown = [talks.administer(ShowEntry(entry.cache_key), **asking) for entry in listed.entries]
    assert [each.preview for each in shown if isinstance(each, EntryInfo)] == [
        entry.preview for entry in listed.entries
    ]
    return [entry.preview for entry in listed.entries]


def test_a_tenant_sees_the_first_words_of_its_last_message() -> None:
    talks = Conversations(CHATML)
    held(talks)
    assert previews(talks, salt=b"one") == ["What is the moon made of?"]
    assert previews(talks, salt=b"one", admin=True) == ["What is the moon made of?"]


def test_an_admin_is_not_shown_other_peoples_words() -> None:
    talks = Conversations(CHATML)
    held(talks)
    assert previews(talks, salt=b"two") == []
    assert previews(talks, salt=b"two", admin=True) == [""]


def test_they_are_known_after_a_restart(tmp_path: Path) -> None:
    talks = Conversations(CHATML, folder=tmp_path)
    held(talks)
    talks.close()
    again = Conversations(CHATML, folder=tmp_path)
    assert previews(again, salt=b"one") == ["What is the moon made of?"]
    again.close()
