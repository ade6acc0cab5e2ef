"""Requests with images and videos, up to the request that the runtime gets."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from rekindle.errors import BadMedia
from rekindle.media import loader
from rekindle.media.decoder import Decoder
from rekindle.media.document import extract_text
from rekindle.media.image import DecodeError, decode_base64, decode_image
from rekindle.media.jobs import Frame, MediaJob
from rekindle.media.video import decode_video
from rekindle.protocol.admin import IndexPrompt, Validate, Validation
from rekindle.protocol.events import Reason
from rekindle.protocol.requests import GenerateRequest, count_images, picture
from tests.api.scripted import Front, ScriptedRuntime, error
from tests.media.attacker import Canary
from tests.media.files import BLUE, clip, corner, plain, saved

QUESTION = {"type": "text", "text": "What is this?"}


class InProcess(Decoder):
    """Decodes here: that a process of its own does is shown elsewhere, and takes a while."""

    async def extract(self, job: MediaJob, tenant: bytes) -> str:
        try:
            return extract_text(decode_base64(job.data) if job.is_base64 else job.data)
        except DecodeError as error:
            raise BadMedia(str(error)) from None

    async def decode(self, job: MediaJob, tenant: bytes) -> list[Frame]:
        try:
            data = decode_base64(job.data) if job.is_base64 else job.data
            if job.sampling:
                return decode_video(data, job.sizing, job.sampling)
            return [decode_image(data, job.sizing)]
        except DecodeError as error:
            raise BadMedia(str(error)) from None


@pytest.fixture(autouse=True)
def _in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "Decoder", InProcess)


def data_url(file: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(file).decode()}"


RED_URL, BLUE_URL = data_url(saved(plain())), data_url(saved(plain(BLUE)))
RED_PICTURE = picture(30, 20, plain().tobytes())
BLUE_PICTURE = picture(30, 20, plain(BLUE).tobytes())
RED_PART = {"type": "image", "image_url": RED_URL}


def asked(*messages: dict[str, Any], **fields: Any) -> GenerateRequest:
    front = Front(ScriptedRuntime(sees=True))
    answer = front.chat(messages=list(messages), **fields)
    assert answer.status_code == 200, answer.text
    return front.runtime.requested


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "image_url": RED_URL},
        {"type": "image_url", "image_url": {"url": RED_URL}},
        {"type": "image_url", "image_url": {"url": RED_URL, "detail": None}},
        {"type": "image_url", "image_url": {"url": RED_URL, "detail": "high"}},
        {"type": "image_url", "image_url": RED_URL, "detail": "auto"},
        {"type": "image", "image_url": {"url": RED_URL, "detail": "low"}, "cache": True},
    ],
)
def test_an_image_is_taken_in_every_form(part: dict[str, Any]) -> None:
    requested = asked(user(QUESTION, part))
    assert requested.messages == [user(QUESTION, {"type": "image"})]
    assert requested.pictures == [RED_PICTURE]


def test_the_nth_image_part_is_the_nth_picture() -> None:
    blue = {"type": "image_url", "image_url": {"url": BLUE_URL}}
    requested = asked(
        {"role": "system", "content": "Look."},
        user(RED_PART, QUESTION, blue),
        {"role": "assistant", "content": [{"type": "text", "text": "Red and blue."}]},
        user(QUESTION, RED_PART),
    )
    assert requested.pictures == [RED_PICTURE, BLUE_PICTURE, RED_PICTURE]
    assert requested.messages is not None
    assert count_images(requested.messages) == 3
    assert requested.messages[2]["content"] == [{"type": "text", "text": "Red and blue."}]


def test_tools_may_return_images() -> None:
    result = {"role": "tool", "tool_call_id": "c1", "content": [RED_PART]}
    requested = asked(user(QUESTION), result)
    assert requested.pictures == [RED_PICTURE]


def test_a_reply_has_no_images() -> None:
    front = Front(ScriptedRuntime(sees=True))
    answer = front.chat(messages=[{"role": "assistant", "content": [RED_PART]}])
    assert answer.status_code == 400
    assert "takes only text" in error(answer)["message"]


@pytest.mark.parametrize(
    ("fields", "size"),
    [
        ({}, (1200, 600)),
        ({"detail": "low"}, (512, 256)),
        ({"detail": "high"}, (1200, 600)),
        ({"detail": "auto"}, (1200, 600)),
    ],
)
def test_low_detail_fits_512_pixels(fields: dict[str, str], size: tuple[int, int]) -> None:
    url = data_url(saved(plain(size=(1200, 600))))
    [found] = asked(user({"type": "image_url", "image_url": {"url": url, **fields}})).pictures
    assert (found.width, found.height) == size


@pytest.mark.parametrize(
    ("resize", "size"), [([64], (64, 64)), ([50, 70], (50, 70)), ([8.0], (8, 8))]
)
def test_resize_gives_every_picture_its_size(resize: list[Any], size: tuple[int, int]) -> None:
    part = {"type": "image_url", "image_url": {"url": RED_URL, "detail": "low"}}
    requested = asked(user(part, RED_PART), resize=resize)
    assert {(found.width, found.height) for found in requested.pictures} == {size}


def test_no_side_is_longer_than_2048_pixels() -> None:
    [found] = asked(
        user({"type": "image", "image_url": data_url(saved(corner((3000, 1000))))})
    ).pictures
    assert (found.width, found.height) == (2048, 683)


@pytest.mark.parametrize("kind", ["video", "video_url"])
def test_a_video_becomes_its_frames_each_behind_its_time(kind: str) -> None:
    url = data_url(clip(frames=40, fps=10, size=(1024, 64)), "video/mp4")
    given = url if kind == "video" else {"url": url}
    part = {"type": kind, "video_url": given, "fps": 0.75, "max_frames": 8}
    requested = asked(user(QUESTION, part, RED_PART))
    assert requested.messages == [
        user(
            QUESTION,
            {"type": "text", "text": "<0.0 seconds>"},
            {"type": "image"},
            {"type": "text", "text": "<1.3 seconds>"},
            {"type": "image"},
            {"type": "text", "text": "<2.6 seconds>"},
            {"type": "image"},
            {"type": "image"},
        )
    ]
    *frames, last = requested.pictures
    assert {(frame.width, frame.height) for frame in frames} == {(768, 48)}
    assert last == RED_PICTURE


def test_a_video_has_a_frame_a_second_up_to_sixteen() -> None:
    url = data_url(clip(frames=60, fps=2, size=(16, 16)), "video/mp4")
    assert len(asked(user({"type": "video", "video_url": url})).pictures) == 16
    url = data_url(clip(frames=10, fps=2, size=(16, 16)), "video/mp4")
    assert len(asked(user({"type": "video", "video_url": url})).pictures) == 5


@pytest.mark.parametrize("kind", ["image", "video"])
@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/cache/prepare", "/v1/cache/validate"]
)
def test_a_model_that_cannot_see_refuses_before_anything_is_fetched(path: str, kind: str) -> None:
    canary = Canary()
    front = Front(media_allow=("127.0.0.1",))
    part = {"type": kind, f"{kind}_url": f"http://127.0.0.1:{canary.port}/"}
    answer = front.post(path, {"messages": [user(part)], "cache_key": "k"})
    assert answer.status_code == 400
    assert error(answer)["code"] == "unsupported_parameter"
    assert "reads only text" in error(answer)["message"]
    assert not canary.was_hit
    assert front.runtime.requests == []
    canary.close()


def test_while_a_model_is_loading_nothing_is_fetched() -> None:
    runtime = ScriptedRuntime(sees=True)
    runtime.supervisor.ready = None
    answer = Front(runtime).chat(messages=[user(RED_PART)])
    assert answer.status_code == 503


@pytest.mark.parametrize(
    ("part", "code"),
    [
        ({"type": "image", "image_url": data_url(b"<html>", "image/png")}, "invalid_media"),
        ({"type": "image", "image_url": "http://127.0.0.1:9/a.png"}, "media_refused"),
        ({"type": "image", "image_url": "file:///etc/passwd"}, "media_refused"),
        ({"type": "video", "video_url": RED_URL}, "invalid_media"),
    ],
)
def test_a_bad_picture_is_a_400_that_says_where(part: dict[str, Any], code: str) -> None:
    front = Front(ScriptedRuntime(sees=True))
    answer = front.chat(messages=[user(QUESTION), user(QUESTION, part)])
    assert answer.status_code == 400
    found = error(answer)
    assert found["code"] == code
    assert found["param"] == "messages"
    assert found["message"].startswith("`messages.1.content.1`: ")
    assert front.runtime.requests == []


def test_images_are_prepared() -> None:
    front = Front(ScriptedRuntime(sees=True))
    body = {"messages": [user(RED_PART)], "resize": [8, 6]}
    front.post("/v1/cache/prepare", body)
    [found] = front.runtime.requested.pictures
    assert (found.width, found.height) == (8, 6)
    front.post("/v1/cache/prepare", {**body, "warm": False})
    op = front.runtime.admin_requests[-1].op
    assert isinstance(op, IndexPrompt)
    assert op.pictures == [found]
    assert op.messages == [user({"type": "image"})]


def test_a_large_data_url_does_not_count_as_text_to_prepare() -> None:
    noise = saved(plain(size=(600, 600)), "BMP")
    front = Front(ScriptedRuntime(sees=True))
    url = data_url(noise)
    assert len(url) > 1_000_000
    front.post("/v1/cache/prepare", {"messages": [user({"type": "image", "image_url": url})]})
    assert len(front.runtime.requested.pictures) == 1


def test_images_are_validated() -> None:
    result = Validation(
        status="hit", reusable_tokens=9, invalidated_at=None, reason=Reason.FULL_MATCH
    )
    front = Front(ScriptedRuntime(sees=True, answers=lambda _op: result))
    body = {"cache_key": "k", "messages": [user(RED_PART)]}
    assert front.post("/v1/cache/validate", body).status_code == 200
    op = front.runtime.admin_request.op
    assert isinstance(op, Validate)
    assert op.pictures == [RED_PICTURE]


def test_the_list_of_models_shows_their_modalities() -> None:
    front = Front(ScriptedRuntime(), ScriptedRuntime(name="eyes", sees=True))
    listed = front.get("/v1/models").json()["data"]
    assert [model["modalities"] for model in listed] == [["text"], ["image", "text"]]
