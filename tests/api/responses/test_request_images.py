"""Images in messages, tool results and stored responses."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.base.test_request_images import RED_URL
from tests.api.responses.asking import answered, ask, refused, runtime_of
from tests.api.scripted import Front

TEXT = {"type": "input_text", "text": "What is it?"}
PICTURE = {"type": "input_image", "image_url": RED_URL, "detail": "auto"}
SEEN = [{"type": "text", "text": "What is it?"}, {"type": "image"}]


@pytest.mark.parametrize("is_output", [False, True])
@pytest.mark.parametrize("truncation", ["disabled", "auto"])
def test_a_picture_reaches_the_runtime_in_its_place(is_output: bool, truncation: str) -> None:
    item: dict[str, Any] = {"role": "user", "content": [TEXT, PICTURE]}
    if is_output:
        item = {"type": "function_call_output", "call_id": "1", "output": [TEXT, PICTURE]}
    front = Front(runtime_of(sees=True))
    first = answered(front, input=[item], truncation=truncation)
    answered(front, input="Sure?", previous_response_id=first["id"])
    for request in front.runtime.requests:
        assert request.messages is not None
        assert request.messages[0]["content"] == SEEN
        assert len(request.pictures) == 1


def test_a_model_that_reads_text_alone_says_so() -> None:
    assert "reads only text" in refused(input=[{"role": "user", "content": [PICTURE]}])


def test_an_error_about_a_picture_names_the_field_of_this_dialect() -> None:
    response = ask(Front(runtime_of()), input=[{"role": "user", "content": [PICTURE]}])
    assert response.json()["error"]["param"] == "input"
