"""Pictures and videos over HTTP for a real vision model, including hostile files."""

from __future__ import annotations

import base64
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from tests.media.attacker import Attacker, Canary, attacking
from tests.media.files import bomb, clip, png
from tests.support.server import Server, running
from tests.support.shapes import FOLDER, asking, data_url

FILE = "red_circle_blue_square_300x200.png"
SEEN = "I see a red circle and a blue square on a white background."
CHAT = "/v1/chat/completions"
PICTURE_TOKENS = 64


@pytest.fixture(scope="module")
def server(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("media")
    flags = ["--vlm", "--media-allow", "localhost", "--media-folder", str(FOLDER)]
    flags += ["--parallel", "2", "--max-model-len", "1024", "--threads", "1"]
    models = {"REKINDLE_MODELS_DIR": str(smollm2_path.parent)}
    with running(Path("smollm2-shapes"), folder, *flags, environment=models) as server:
        yield server


@pytest.fixture(scope="module")
def attacker() -> Iterator[Attacker]:
    with attacking() as attacker:
        attacker.files["/elsewhere"] = ((FOLDER / FILE).read_bytes(), "text/plain")
        attacker.files["/a.png"] = (b"<!doctype html><title>not a picture</title>", "image/png")
        yield attacker


def ask(
    server: Server, *parts: dict[str, Any], ask: str = "What do you see?", **fields: Any
) -> Any:
    content = [*parts, {"type": "text", "text": ask}]
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 24}
    with server.client() as http:
        return http.post(CHAT, json={**body, **fields})


def image(url: str) -> dict[str, Any]:
    return {"type": "image", "image_url": url}


def text(answer: Any) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def reused(answer: Any) -> int:
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def refusal(answer: Any) -> dict[str, Any]:
    assert answer.status_code == 400, answer.text
    found: dict[str, Any] = answer.json()["error"]
    assert found["param"] == "messages"
    return found


def test_the_openai_client_can_ask_about_a_picture(server: Server) -> None:
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=300)
    [model] = client.models.list().data
    assert (model.id, model.model_dump()["modalities"]) == ("smollm2-shapes", ["image", "text"])
    messages: Any = [asking("What do you see?", FILE)]
    reply = client.chat.completions.create(
        model="default", messages=messages, temperature=0, max_tokens=24
    )
    assert reply.choices[0].message.content == SEEN


def test_the_same_picture_at_another_address_is_reused(server: Server, attacker: Attacker) -> None:
    for url in (
        data_url(FILE),
        attacker.url("/redirect?/elsewhere", "localhost"),
        f"file://{FOLDER}/{FILE}",
    ):
        answer = ask(server, image(url), ask="What color is the square?")
        assert text(answer) == "The square is blue."
    assert reused(answer) > PICTURE_TOKENS


def test_a_changed_picture_at_the_same_address_is_noticed(
    server: Server, attacker: Attacker
) -> None:
    url = attacker.url("/changing", "localhost")
    for file, color in (("red_circle_224.png", "red circle"), ("plain_blue_32.png", "blue")):
        attacker.files["/changing"] = ((FOLDER / file).read_bytes(), "")
        assert color in text(ask(server, image(url)))


def test_a_video_is_split_into_frames_and_reused(server: Server) -> None:
    video = base64.b64encode(clip(frames=40, fps=10)).decode()
    part = {"type": "video", "video_url": f"data:video/mp4;base64,{video}", "max_frames": 3}
    first = ask(server, part, ask="What color is it?", max_tokens=1)
    assert first.json()["usage"]["prompt_tokens"] > 3 * PICTURE_TOKENS
    second = ask(server, part, ask="Is there a star?", max_tokens=1)
    assert reused(second) > 3 * PICTURE_TOKENS


def test_a_prepared_picture_is_a_cache_hit(server: Server) -> None:
    message = asking("What color is the star?", "yellow_star_640x480.jpg")
    with server.client() as http:
        prepared = http.post("/v1/cache/prepare", json={"messages": [message]}).json()
        body = {"cache_key": prepared["cache_key"], "messages": [message]}
        assert http.post("/v1/cache/validate", json=body).json()["status"] == "hit"
        other = asking("What color is the star?", "white_star_on_red_180x240.png")
        changed = http.post("/v1/cache/validate", json={**body, "messages": [other]}).json()
        assert changed["status"] != "hit"
        answer = http.post(CHAT, json={**body, "temperature": 0, "max_tokens": 12})
    assert text(answer) == "The star is yellow."
    assert reused(answer) > PICTURE_TOKENS


def test_urls_cannot_reach_this_machine(server: Server, attacker: Attacker) -> None:
    canary = Canary()
    hosts = [
        "127.0.0.1", "127.1", "2130706433", "0x7f000001", "[::ffff:7f00:1]", "[::1]", "0.0.0.0",
        "user@localhost", "localhost@127.0.0.1", "127.0.0.1\\@localhost", "169.254.169.254",
    ]  # fmt: skip
    urls = [f"http://{host}:{canary.port}/?a-canary-token" for host in hosts]
    urls += [attacker.url(f"/redirect?{url}", "localhost") for url in urls[:5]]
    urls += ["file:///etc/passwd", f"file://{FOLDER}/../server.py", "gopher://localhost/"]
    for url in urls:
        for part in (image(url), {"type": "video", "video_url": url}):
            refused = refusal(ask(server, part))
            assert refused["code"] == "media_refused", url
            assert "a-canary-token" not in refused["message"]
    assert not canary.was_hit
    assert "a-canary-token" not in server.log.read_text()
    canary.close()


def test_hostile_files_are_refused_without_side_effects(server: Server, attacker: Attacker) -> None:
    whole = (FOLDER / FILE).read_bytes()
    hostile = [
        png(30_000, 30_000, bomb(1 << 20)),
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        whole[: len(whole) // 2],
        b"",
    ]
    urls = [f"data:image/png;base64,{base64.b64encode(file).decode()}" for file in hostile]
    urls += [attacker.url(path, "localhost") for path in ("/a.png", "/huge-header", "/endless")]
    decoders = some_decoders(server)
    for url in urls:
        assert refusal(ask(server, image(url)))["code"] == "invalid_media"
    assert set(server.decoder_pids()) == decoders
    assert text(ask(server, image(data_url(FILE)), ask="Is there a circle?"))


def test_a_decoder_that_dies_is_replaced_while_replies_continue(server: Server) -> None:
    before = some_decoders(server)
    story = [{"role": "user", "content": "Tell me a long story."}]
    body = {"messages": story, "stream": True, "max_tokens": 20, "ignore_eos": True, "seed": 1}
    with server.client() as http, http.stream("POST", CHAT, json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        cross = image(data_url("purple_cross_64.png"))
        assert text(ask(server, cross, ask="What shape is it?")) == "It is a cross."
        assert "data: [DONE]" in list(lines)
    assert set(server.decoder_pids()).isdisjoint(before)


def some_decoders(server: Server) -> set[int]:
    """Decoders start with the first picture."""
    assert text(ask(server, image(data_url(FILE)), max_tokens=1))
    return set(server.decoder_pids())
