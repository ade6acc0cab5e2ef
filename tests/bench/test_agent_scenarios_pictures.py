"""Each round asks about a new picture, which is the same for both servers."""

from __future__ import annotations

import base64
from collections.abc import Callable
from io import BytesIO, StringIO
from typing import Any

from PIL import Image
from rich.console import Console

from rekindle.bench import BenchOptions, run
from tests.bench.fake_openai import FakeOpenAI

Serve = Callable[[FakeOpenAI], str]


def asked(serve: Serve, seed: str) -> list[list[dict[str, Any]]]:
    """The conversations with a picture that a fake received in two rounds."""
    fake = FakeOpenAI()
    options = BenchOptions(base_url=serve(fake), scenarios=("pictures",), repeats=2, seed=seed)
    run(options, Console(file=StringIO()))
    messages = [body["messages"] for body in fake.bodies]
    return [each for each in messages if isinstance(each[0]["content"], list)]


def test_a_picture_gets_two_questions_and_one_in_a_new_conversation(serve: Serve) -> None:
    first, second, other, *_ = asked(serve, "a")
    assert [len(each) for each in (first, second, other)] == [1, 3, 1]
    assert second[0] == first[0]
    assert other[0]["content"][0] == first[0]["content"][0]
    assert other[0]["content"][1] != first[0]["content"][1]


def test_each_round_has_a_new_picture_that_is_the_same_for_both_servers(serve: Serve) -> None:
    urls = [each[0]["content"][0]["image_url"]["url"] for each in asked(serve, "a")]
    assert urls[0] != urls[3]
    assert asked(serve, "a")[0] == asked(serve, "a")[0]
    head, _, data = urls[0].partition(",")
    assert head == "data:image/png;base64"
    assert Image.open(BytesIO(base64.b64decode(data))).size == (512, 512)
