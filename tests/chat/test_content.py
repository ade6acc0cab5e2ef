from __future__ import annotations

import pytest

from rekindle.chat.content import content_text


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("hi", "hi"),
        ("", ""),
        (None, ""),
        (7, ""),
        ([], ""),
        ([{"type": "text", "text": "one"}, {"type": "text", "text": "two"}], "one\ntwo"),
        ([{"type": "image_url"}, {"type": "text", "text": "one"}, "two", {"text": 1}], "one"),
    ],
)
def test_the_text_of_any_content_is_found(content: object, text: str) -> None:
    assert content_text(content) == text
