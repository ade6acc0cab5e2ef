"""The session header names the conversation, in every dialect."""

from __future__ import annotations

from typing import Any

import pytest

from rekindle.api.base.fields import MAX_ID_CHARACTERS
from tests.api.scripted import Front

HELLO = [{"role": "user", "content": "hi"}]
DIALECTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/completions": {"prompt": "hi"},
    "/v1/messages": {"messages": HELLO, "max_tokens": 8},
    "/v1/responses": {"input": "hi", "store": False},
    "/api/chat": {"messages": HELLO, "stream": False},
    "/api/generate": {"prompt": "hi", "raw": True, "stream": False},
}
in_every_dialect = pytest.mark.parametrize(("path", "body"), DIALECTS.items())


def name(path: str, body: dict[str, Any], session: str, **settings: Any) -> str | None:
    """By which the runtime is to look for the conversation."""
    front = Front(**settings)
    answer = front.post(path, body, headers={"x-session-affinity": session})
    assert answer.status_code == 200, answer.text
    names = front.runtime.requested.names
    return names.prompt_cache_key if names else None


@in_every_dialect
def test_the_session_of_the_header_is_a_name(path: str, body: dict[str, Any]) -> None:
    assert name(path, body, "ses_1") == "ses_1"
    assert name(path, body, "") is None
    assert name(path, body, "ses_1", context_cache=False) is None


@in_every_dialect
def test_a_session_too_long_for_a_name_still_is_one(path: str, body: dict[str, Any]) -> None:
    one, other = (name(path, body, "s" * 5000 + end) for end in "ab")
    assert one is not None
    assert other is not None
    assert one != other
    assert len(one) <= MAX_ID_CHARACTERS


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"prompt_cache_key": "own"}),
        ("/v1/responses", {"prompt_cache_key": "own"}),
        ("/v1/messages", {"metadata": {"user_id": "own"}}),
    ],
)
def test_a_name_in_the_request_goes_before_the_headers(path: str, fields: dict[str, Any]) -> None:
    assert name(path, {**DIALECTS[path], **fields}, "ses_1") == "own"


def test_several_prompts_have_no_session() -> None:
    front = Front()
    asked = {"prompt": ["one", "other"]}
    front.post("/v1/completions", asked, headers={"x-session-affinity": "ses_1"})
    assert [request.names for request in front.runtime.requests] == [None, None]
