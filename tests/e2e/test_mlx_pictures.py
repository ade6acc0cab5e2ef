"""The server reads pictures and videos with a model folder in MLX's format, in every dialect."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.media.attacker import attacking
from tests.media.files import clip
from tests.support.server import Server, running
from tests.support.shapes import FOLDER, asking, data_url
from tests.support.tiny_vision import write_tiny_vision

FILE, OTHER = "red_circle_blue_square_300x200.png", "yellow_star_640x480.jpg"
CHAT = "/v1/chat/completions"
#: Fields of the requests that servers of MLX models document.
DOCUMENTED: dict[str, Any] = {
    "model": "tiny-vl",
    "max_tokens": 100,
    "temperature": 0.7,
    "top_p": 0.9,
    "stream": False,
    "stop": ["###", "END"],
    "repetition_penalty": 1.1,
    "repetition_context_size": 20,
}
SYSTEM = {"role": "system", "content": "You are a helpful assistant."}
WIDE: dict[str, Any] = {
    "head_dim": 64,
    "rope_scaling": {"rope_type": "default", "mrope_section": [16, 8, 8]},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mlx-pictures")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    model = write_tiny_vision(folder / "tiny-vl", "qwen3_vl", **WIDE)
    with running(model, folder, "--vlm", "--media-allow", "localhost") as started:
        yield started


def post(server: Server, path: str, **body: Any) -> dict[str, Any]:
    with server.client() as client:
        answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def ask(server: Server, *messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    settings = {"temperature": 0, "max_tokens": 8, **fields}
    return post(server, CHAT, messages=list(messages), **settings)


def content(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


def stats(server: Server) -> dict[str, int]:
    with server.client() as client:
        return dict(client.get("/v1/cache/stats").json())


def computed(answer: dict[str, Any]) -> int:
    usage = answer["usage"]
    return int(usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"])


def test_the_documented_request_is_answered(server: Server) -> None:
    with attacking() as site:
        site.files["/image.jpg"] = ((FOLDER / OTHER).read_bytes(), "image/jpeg")
        site.files["/video.mp4"] = (clip(frames=40, fps=10), "video/mp4")
        parts = [
            {"type": "text", "text": "What do you see in this image?"},
            {"type": "image", "image_url": site.url("/image.jpg", "localhost")},
            {"type": "video", "video_url": site.url("/video.mp4", "localhost")},
            {"type": "text", "text": "Please describe it in detail."},
        ]
        messages = [SYSTEM, {"role": "user", "content": parts}]
        answer = post(server, CHAT, messages=messages, resize=[512, 512], **DOCUMENTED)
    assert {"id", "object", "created", "model", "choices", "usage"} <= answer.keys()
    assert answer["object"] == "chat.completion"
    [choice] = answer["choices"]
    assert (choice["index"], choice["message"]["role"]) == (0, "assistant")
    assert answer["usage"]["prompt_tokens"] > 5 * 36  # a picture and four frames


def test_text_requests_of_the_same_server_are_answered(server: Server) -> None:
    eight_bits = {"kv_bits": 8, "kv_group_size": 64, "kv_quantization_start": 1000}
    prompt = "Your text prompt goes here"
    answer = post(server, "/v1/completions", prompt=prompt, **eight_bits, **DOCUMENTED)
    assert answer["choices"][0]["text"]
    messages = [SYSTEM, {"role": "user", "content": "Hello, what can you help me with?"}]
    four_bits = {"kv_bits": 4, "kv_quantization_start": 500}
    assert content(post(server, CHAT, messages=messages, **four_bits, **DOCUMENTED))
    with server.client() as client:
        [model] = client.get("/v1/models").json()["data"]
    assert (model["id"], model["modalities"]) == ("tiny-vl", ["image", "text"])


def test_a_second_question_encodes_nothing_and_computes_only_itself(server: Server) -> None:
    before = stats(server)["encoded_pictures"]
    messages = [asking("Look at these two.", FILE, OTHER)]
    answers = [ask(server, *messages)]
    messages += [{"role": "assistant", "content": content(answers[0])}]
    messages += [{"role": "user", "content": "And now?"}]
    answers.append(ask(server, *messages))
    assert stats(server)["encoded_pictures"] - before == 2
    assert computed(answers[1]) < 40
    ask(server, {"role": "system", "content": "Another start."}, asking("Look.", FILE))
    assert stats(server)["encoded_pictures"] - before == 2
    cold = ask(server, *messages, use_kv_cache=False)
    assert content(cold) == content(answers[1])


def test_a_picture_is_requantised_with_its_positions(server: Server) -> None:
    smaller = {"kv_bits": 8, "kv_quantization_start": 100}
    messages = [asking("Look at this one, and at that one. " * 3, FILE, OTHER)]
    first = ask(server, *messages, **smaller)
    assert first["x_cache"]["kv_bits"] == 8
    messages += [{"role": "assistant", "content": content(first)}]
    messages += [{"role": "user", "content": "And now?"}]
    second = ask(server, *messages, **smaller)
    assert computed(second) < 40
    assert content(second) == content(ask(server, *messages, **smaller, use_kv_cache=False))


def test_resizing_changes_the_picture_and_the_answer(server: Server) -> None:
    sizes = [
        ask(server, asking("Look.", FILE), resize=resize)["usage"]["prompt_tokens"]
        for resize in ([16], [48, 16], [48])
    ]
    assert sizes == sorted(set(sizes))


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", "/api/chat"])
def test_other_dialects_carry_pictures(server: Server, path: str) -> None:
    url = data_url(FILE)
    data = url.partition(",")[2]
    shown: dict[str, Any] = {
        "/v1/responses": {
            "input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}],
            "max_output_tokens": 4,
        },
        "/v1/messages": {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "image",
                            "source": {"type": "base64", "media_type": "image/png", "data": data},
                        }
                    ],
                }
            ],
            "max_tokens": 4,
        },
        "/api/chat": {
            "messages": [{"role": "user", "content": "Look.", "images": [data]}],
            "stream": False,
        },
    }[path]
    answer = post(server, path, model="tiny-vl", **shown)
    usage = answer.get("usage") or {"input_tokens": answer["prompt_eval_count"]}
    with_cached = usage["input_tokens"] + usage.get("cache_read_input_tokens", 0)
    assert with_cached + usage.get("cache_creation_input_tokens", 0) > 20


def test_exact_answers_equal_those_of_a_server_without_a_cache(server: Server) -> None:
    messages = [asking("Look at both, and tell me what they are. " * 3, OTHER, FILE)]
    exact = {"cache_exact": True, "logprobs": True}
    cold = ask(server, *messages, **exact, cache=False)
    kept, warm = (ask(server, *messages, **exact) for _ in range(2))
    assert computed(warm) < computed(cold)
    assert warm["choices"] == kept["choices"] == cold["choices"]


def test_a_restarted_server_encodes_and_computes_nothing_again(
    server: Server, folder: Path
) -> None:
    """Runs last, because it uses the cache folder of the server."""
    server.process.terminate()
    server.process.wait(30)
    model = folder / "tiny-vl"
    with running(model, folder, "--vlm") as second:
        messages = [asking("Look at these two.", FILE, OTHER)]
        again = ask(second, *messages)
        assert computed(again) == 1
        ask(second, {"role": "system", "content": "Yet another start."}, asking("Look.", FILE))
        after = stats(second)
        assert (after["encoded_pictures"], after["picture_hits"]) == (0, 1)
