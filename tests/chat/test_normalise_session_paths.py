"""The `session-paths` normaliser replaces session ids in paths of a system prompt."""

from __future__ import annotations

from typing import Any

import pytest

from rekindle.chat.normalise import normalise, without_session_paths

ONE, OTHER = "0b55f3a0-6a3e-4d8e-9d3e-1f2a3b4c5d6e", "77777777-aaaa-BBBB-cccc-0123456789ab"
USER = {"role": "user", "content": f"See /logs/{ONE}/a.txt"}


def changed(content: Any, role: str = "system") -> Any:
    [message], found = without_session_paths([{"role": role, "content": content}])
    assert found == (message["content"] != content)
    return message["content"]


@pytest.mark.parametrize(
    ("text", "without"),
    [
        (f"Use /home/u/.copilot/session-state/{ONE}/plan.md.", "/session-state/session/plan.md."),
        (f"Session folder: ~/.copilot/session-state/{ONE}", "session-state/session"),
        (f"`/tmp/{OTHER}`, and {ONE}", f"`/tmp/session`, and {ONE}"),
        (rf"C:\Users\u\sessions\{ONE}\a", r"\sessions\session\a"),
        ("/x/sessions/20261115-1200-ab12/log", "/x/sessions/session/log"),
        (f"/a/{ONE}/b/{OTHER}/c", "/a/session/b/session/c"),
    ],
)
@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_session_id_in_a_path_is_replaced(text: str, without: str, role: str) -> None:
    assert without in changed(text, role)
    parts = [{"type": "text", "text": "First."}, {"type": "text", "text": text}]
    assert without in changed(parts, role)[1]["text"]


@pytest.mark.parametrize(
    "content",
    [
        None,
        "",
        [],
        f"The id {ONE} alone",
        f"/a/{ONE}x/b",
        f"/a/{ONE}-1",
        "/docs/sessions/handling/of",
        "/docs/sessions/v2/of",
        "/a/b/c/12345678/d",
        "/" * 100_000,
        "/sessions/" * 20_000,
        "/sessions/" + "a" * 100_000,
        f"/{ONE[:-1]}" * 5_000,
    ],
)
def test_other_paths_stay_unchanged(content: Any) -> None:
    assert changed(content) == content


def test_text_of_a_user_stays_unchanged() -> None:
    later = [USER, {"role": "system", "content": f"/a/{ONE}/b"}]
    assert without_session_paths(later) == (later, False)


def test_the_normaliser_is_off_by_default() -> None:
    messages = [{"role": "system", "content": f"/a/{ONE}/b"}, USER]
    assert normalise(messages, None).messages == messages
    normalised = normalise(messages, None, ["session-paths"])
    assert normalised.messages == [{"role": "system", "content": "/a/session/b"}, USER]
    assert normalised.changes == ["session-paths"]
