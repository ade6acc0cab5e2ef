"""The real server answers questions that only a model with vision can answer, and reuses
pictures."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from rekindle.models.pull import packaged_projector
from tests.support.rounds import rounds
from tests.support.server import Server, running
from tests.support.shapes import asking, conversations, questions

PICTURE_TOKENS = 64
RED_CIRCLE, BLUE_SQUARE = "red_circle_224.png", "blue_square_300x200.png"
YELLOW_STAR = "yellow_star_640x480.jpg"
BOTH = "red_circle_blue_square_300x200.png"
LOOK = "What do you see?"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "paint",
            "description": "Paint a wall.",
            "parameters": {
                "type": "object",
                "properties": {"color": {"enum": ["red", "blue"]}},
                "required": ["color"],
                "additionalProperties": False,
            },
        },
    }
]

Messages = list[dict[str, Any]]


def plain_picture(color: tuple[int, int, int]) -> str:
    """A picture that no other test uses."""
    file = BytesIO()
    Image.new("RGB", (40, 30), color).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


class Visitor:
    """Asks greedily, and checks the cost of each question."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client

    def ask(self, messages: Messages, **request: Any) -> dict[str, Any]:
        body = {"messages": messages, "temperature": 0, "max_tokens": 40, **request}
        answer = self._client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def look(self, question: str, *files: str, **request: Any) -> str:
        return text_of(self.ask([asking(question, *files)], **request))

    def stats(self) -> dict[str, int]:
        return dict(self._client.get("/v1/cache/stats").json())

    @property
    def encoded(self) -> int:
        return self.stats()["encoded_pictures"]


def text_of(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


def computed(answer: dict[str, Any]) -> int:
    usage = answer["usage"]
    return int(usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"])


def serving(path: Path, folder: Path) -> Any:
    flags = ("--mmproj", str(packaged_projector("smollm2-shapes")), "--max-model-len", "2048")
    return running(path, folder, *flags, "--parallel", "4", "--threads", "1")


@pytest.fixture(scope="module")
def server(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(smollm2_path, tmp_path_factory.mktemp("server")) as started:
        yield started


@pytest.fixture(scope="module")
def visitor(server: Server) -> Iterator[Visitor]:
    with server.client() as client:
        yield Visitor(client)


@pytest.mark.long
def test_questions_about_sample_pictures_are_answered_exactly(visitor: Visitor) -> None:
    every = questions()
    for question in every[:: len(every) // rounds(5, len(every))]:
        assert visitor.look(question.ask, question.file) == question.expect


def test_a_follow_up_computes_only_its_own_tokens(visitor: Visitor) -> None:
    messages: Messages = []
    sizes = []
    for turn in conversations()[0]:
        messages.append(asking(turn["ask"], *turn["images"]))
        answer = visitor.ask(messages)
        assert text_of(answer) == turn["expect"]
        messages.append({"role": "assistant", "content": text_of(answer)})
        sizes.append(computed(answer))
    assert max(sizes[1:]) < 25  # the question with the template around it


def test_two_pictures_are_told_apart_in_either_order(visitor: Visitor) -> None:
    seen = {
        BLUE_SQUARE: "I see a blue square on a white background.",
        YELLOW_STAR: "I see a yellow star on a gray background.",
    }
    for order in ((BLUE_SQUARE, YELLOW_STAR), (YELLOW_STAR, BLUE_SQUARE)):
        messages: Messages = []
        for file in order:  # by a margin of more than 4 in both orders
            messages.append(asking(LOOK, file))
            answer = text_of(visitor.ask(messages))
            assert answer == seen[file]
            messages.append({"role": "assistant", "content": answer})


def test_ten_questions_on_one_picture_encode_it_once(visitor: Visitor) -> None:
    shown = {"type": "image_url", "image_url": {"url": plain_picture((200, 30, 90))}}

    def asking_about(question: str) -> dict[str, Any]:
        return {"role": "user", "content": [shown, {"type": "text", "text": question}]}

    before = visitor.stats()
    answers = [
        visitor.ask([asking_about(f"Question {number}: what is it?")], max_tokens=1)
        for number in range(10)
    ]
    after = visitor.stats()
    assert after["encoded_pictures"] - before["encoded_pictures"] == 1
    assert (
        after["picture_hits"] == before["picture_hits"]
    )  # the prefix is reused, including the picture
    assert max(map(computed, answers[1:])) < 25
    elsewhere = [{"role": "system", "content": "You see."}, asking_about("What is it?")]
    visitor.ask(elsewhere, max_tokens=1)
    assert visitor.stats()["picture_hits"] == before["picture_hits"] + 1
    assert visitor.encoded == after["encoded_pictures"]


def test_exact_answers_equal_those_of_a_server_without_a_cache(visitor: Visitor) -> None:
    """Their log probabilities are bit-identical, too."""
    messages = [
        asking(LOOK, BOTH),
        {
            "role": "assistant",
            "content": "I see a red circle and a blue square on a white background.",
        },
        {"role": "user", "content": "What color is the square?"},
    ]
    exact = {"cache_exact": True, "logprobs": True, "max_tokens": 12}
    cold = visitor.ask(messages, **exact, cache=False)
    kept, warm = (visitor.ask(messages, **exact) for _ in range(2))
    assert computed(warm) == computed(cold) - 128  # two prefill chunks
    assert warm["choices"] == kept["choices"] == cold["choices"]
    again = visitor.ask(messages[:1], **exact)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 64  # inside the picture
    assert again["choices"] == visitor.ask(messages[:1], **exact, cache=False)["choices"]


def test_requantisation_may_happen_inside_a_picture(visitor: Visitor) -> None:
    """The first tokens are computed in f16 and the rest in 8 bits.

    The next turn continues from there.
    """
    messages: Messages = [asking(LOOK, BOTH)]
    smaller = {"kv_bits": 8, "kv_quantization_start": 50}
    first = visitor.ask(messages, **smaller)
    assert text_of(first) == "I see a red circle and a blue square on a white background."
    assert first["x_cache"]["kv_bits"] == 8
    messages.append({"role": "assistant", "content": text_of(first)})
    messages.append({"role": "user", "content": "What color is the square?"})
    second = visitor.ask(messages, **smaller)
    assert text_of(second) == "The square is blue."
    assert computed(second) < 25


def test_tools_and_pictures_are_used_in_one_conversation(visitor: Visitor) -> None:
    messages: Messages = [asking("Paint the wall.", BLUE_SQUARE)]
    required = {"tools": TOOLS, "tool_choice": "required"}
    called = visitor.ask(messages, **required)["choices"][0]["message"]
    [call] = called["tool_calls"]
    assert call["function"]["name"] == "paint"
    result = {"role": "tool", "tool_call_id": call["id"], "content": "Done."}
    messages += [called, result, asking(LOOK, RED_CIRCLE)]
    answer = visitor.ask(messages, tools=TOOLS, tool_choice="none", max_tokens=8)
    assert PICTURE_TOKENS < computed(answer) < 2 * PICTURE_TOKENS  # only the second picture
    again = visitor.ask(messages, tools=TOOLS, tool_choice="none", max_tokens=1)
    assert computed(again) == 1


def test_text_of_a_user_never_becomes_a_picture(visitor: Visitor) -> None:
    """Neither mtmd's marker nor our own placeholder becomes a picture."""
    written = "<__media__>[image 00]\ufdd0 What do you see?"
    plain = visitor.ask([{"role": "user", "content": written}], max_tokens=1)
    shown = visitor.ask([asking(written, RED_CIRCLE)], max_tokens=1)
    sizes = [answer["usage"]["prompt_tokens"] for answer in (plain, shown)]
    assert sizes[1] - sizes[0] == PICTURE_TOKENS


def test_more_pictures_than_fit_are_refused(server: Server) -> None:
    many = asking(LOOK, *["plain_blue_32.png"] * 32)
    with server.client() as client:
        answer = client.post("/v1/chat/completions", json={"messages": [many]})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
    assert "Send fewer pictures" in error["message"]


def test_state_and_vectors_survive_a_restart(smollm2_path: Path, tmp_path: Path) -> None:
    messages: Messages = [asking(LOOK, BOTH)]
    with serving(smollm2_path, tmp_path) as first, first.client() as client:
        answer = Visitor(client).ask(messages)
    messages += [{"role": "assistant", "content": text_of(answer)}]
    messages += [{"role": "user", "content": "What color is the square?"}]
    with serving(smollm2_path, tmp_path) as second, second.client() as client:
        visitor = Visitor(client)
        follow_up = visitor.ask(messages)
        assert text_of(follow_up) == "The square is blue."
        assert computed(follow_up) < 25
        elsewhere = [{"role": "system", "content": "You see."}, asking("What is it?", BOTH)]
        visitor.ask(elsewhere, max_tokens=1)
        stats = visitor.stats()
        assert (stats["encoded_pictures"], stats["picture_hits"]) == (0, 1)
