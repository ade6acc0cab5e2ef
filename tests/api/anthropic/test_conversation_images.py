"""Images in messages and tool results."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.anthropic.asking import ask, error
from tests.api.base.test_request_images import RED_URL
from tests.api.scripted import Front, ScriptedRuntime

BASE64 = {"type": "base64", "media_type": "image/png", "data": RED_URL.partition(",")[2]}
TEXT = {"type": "text", "text": "What is it?"}


@pytest.mark.parametrize("source", [BASE64, {"type": "url", "url": RED_URL}])
@pytest.mark.parametrize("is_result", [False, True])
def test_a_picture_reaches_the_runtime_in_its_place(source: Any, is_result: bool) -> None:
    content: list[dict[str, Any]] = [TEXT, {"type": "image", "source": source}]
    if is_result:
        content = [{"type": "tool_result", "tool_use_id": "1", "content": content}]
    front = Front(ScriptedRuntime(sees=True))
    answer = ask(front, messages=[{"role": "user", "content": content}])
    assert answer.status_code == 200, answer.text
    request = front.runtime.requested
    assert request.messages is not None
    assert request.messages[0]["role"] == ("tool" if is_result else "user")
    assert request.messages[0]["content"] == [TEXT, {"type": "image"}]
    assert len(request.pictures) == 1


def test_a_model_that_reads_text_alone_says_so() -> None:
    picture = {"type": "image", "source": BASE64}
    answer = ask(Front(), messages=[{"role": "user", "content": [picture]}])
    assert "reads only text" in error(answer)["message"]
