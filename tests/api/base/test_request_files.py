"""Files with text, such as PDFs, in each dialect, up to the request that the runtime gets."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from rekindle.media import loader
from rekindle.media.document import tiny_pdf
from tests.api.base.test_request_images import RED_PART, RED_PICTURE, InProcess, data_url
from tests.api.responses.asking import runtime_of
from tests.api.scripted import Front

PDF = tiny_pdf("It is 40 degrees.")
PDF_URL = data_url(PDF, "application/pdf")
ASKED = "How warm is it?"
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"


@pytest.fixture(autouse=True)
def _in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "Decoder", InProcess)


def body_of(path: str, url: str, name: str | None = None) -> dict[str, Any]:
    """A question about a file, in the words of the dialect."""
    if path == CHAT:
        part: dict[str, Any] = {"type": "file", "file": {"file_data": url, "filename": name}}
        return {"messages": [{"role": "user", "content": [part, {"type": "text", "text": ASKED}]}]}
    if path == RESPONSES:
        part = {"type": "input_file", "file_data": url, "filename": name}
        asked = {"type": "input_text", "text": ASKED}
        return {"input": [{"role": "user", "content": [part, asked]}]}
    media_type, _, data = url.removeprefix("data:").partition(";base64,")
    source = {"type": "base64", "media_type": media_type, "data": data}
    document: dict[str, Any] = {"type": "document", "source": source, "title": name}
    content = [document, {"type": "text", "text": ASKED}]
    return {"max_tokens": 9, "messages": [{"role": "user", "content": content}]}


def sent(front: Front, path: str, body: dict[str, Any]) -> httpx.Response:
    return front.post(path, body)


def refusal(path: str, body: dict[str, Any]) -> str:
    answer = sent(Front(runtime_of()), path, body)
    assert answer.status_code == httpx.codes.BAD_REQUEST
    return str(answer.json()["error"]["message"])


def texts(front: Front) -> list[str]:
    """The texts of the first message as the template reads it."""
    messages = front.runtime.requests[-1].messages
    assert messages is not None
    return [part["text"] for part in messages[0]["content"] if part["type"] == "text"]


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
@pytest.mark.parametrize("url", [PDF_URL, data_url(b"It is 40 degrees.", "text/plain")])
def test_the_text_of_a_file_stands_in_its_place_after_its_name(path: str, url: str) -> None:
    front = Front(runtime_of())
    answer = sent(front, path, body_of(path, url, "weather.pdf"))
    assert answer.status_code == httpx.codes.OK, answer.text
    separator = ["weather.pdf", "It is 40 degrees."]
    read = separator if path == MESSAGES else ["\n\n".join(separator)]
    assert texts(front) == [*read, ASKED]
    assert front.runtime.requested.pictures == []


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_a_file_without_a_name_is_its_text_alone(path: str) -> None:
    front = Front(runtime_of())
    assert sent(front, path, body_of(path, PDF_URL)).status_code == httpx.codes.OK
    assert texts(front) == ["It is 40 degrees.", ASKED]


def test_base64_without_the_beginning_of_a_url_is_read() -> None:
    front = Front(runtime_of())
    bare = PDF_URL.partition(",")[2]
    assert sent(front, CHAT, body_of(CHAT, bare)).status_code == httpx.codes.OK
    assert texts(front)[0] == "It is 40 degrees."


def test_files_and_pictures_keep_their_order() -> None:
    front = Front(runtime_of(sees=True))
    file = {"type": "file", "file": {"file_data": PDF_URL}}
    content = [file, RED_PART, {"type": "text", "text": ASKED}, file]
    body = {"messages": [{"role": "user", "content": content}]}
    assert sent(front, CHAT, body).status_code == httpx.codes.OK
    messages = front.runtime.requested.messages
    assert messages is not None
    kinds = [part["type"] for part in messages[0]["content"]]
    assert kinds == ["text", "image", "text", "text"]
    assert front.runtime.requested.pictures == [RED_PICTURE]


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_a_file_that_cannot_be_read_is_a_bad_request_that_says_what_to_send(path: str) -> None:
    picture = data_url(b"\xff\xd8\xff", "image/jpeg")
    assert "neither a PDF nor text in UTF-8" in refusal(path, body_of(path, picture))


@pytest.mark.parametrize(
    ("path", "part"),
    [
        (CHAT, {"type": "file", "file": {"file_id": "file-1"}}),
        (RESPONSES, {"type": "input_file", "file_id": "file-1"}),
        (MESSAGES, {"type": "document", "source": {"type": "file", "file_id": "file-1"}}),
    ],
)
def test_an_uploaded_file_is_refused_with_what_to_send_instead(
    path: str, part: dict[str, Any]
) -> None:
    body = body_of(path, PDF_URL)
    [message] = body.get("messages") or body["input"]
    message["content"] = [part]
    assert "uploaded files are not supported: send" in refusal(path, body)


def test_a_file_by_url_obeys_the_rules_for_pictures() -> None:
    part = {"type": "input_file", "file_url": "http://127.0.0.1:1/a.pdf"}
    body = {"input": [{"role": "user", "content": [part]}]}
    assert "--media-allow" in refusal(RESPONSES, body)


def test_a_stored_response_with_a_file_is_continued_from_its_text() -> None:
    front = Front(runtime_of())
    first = sent(front, RESPONSES, body_of(RESPONSES, PDF_URL)).json()
    more = {"input": "Sure?", "previous_response_id": first["id"]}
    assert sent(front, RESPONSES, more).status_code == httpx.codes.OK
    assert texts(front) == ["It is 40 degrees.", ASKED]
