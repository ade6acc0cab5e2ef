"""The whole server works with other engines, such as the one in NumPy that is not part of the
package."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.numpy_engine import SUFFIX
from tests.support.numpy_engine.model import write_numpy
from tests.support.server import Server, running
from tests.support.tiny_mlx import write_tiny_mlx

LONG = "The sea has many ships, and every ship has a name that nobody remembers twice. " * 3


def serve(folder: Path, engine: str) -> AbstractContextManager[Server]:
    if engine == "numpy":
        return running(write_numpy(folder / f"tiny{SUFFIX}"), folder)
    return running(write_tiny_mlx(folder / "tiny"), folder)


@pytest.fixture(scope="module", params=["numpy", "mlx"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    with serve(tmp_path_factory.mktemp(request.param), request.param) as started:
        yield started


def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def chat(server: Server, messages: list[Any], **options: Any) -> Any:
    fields = {"max_tokens": 24, "temperature": 0, **options}
    return client(server).chat.completions.create(model="default", messages=messages, **fields)


def cached(answer: Any) -> int:
    return int(answer.usage.prompt_tokens_details.cached_tokens)


def turns(first: str, answer: Any) -> list[Any]:
    """The first question, its answer and another question."""
    return [
        {"role": "user", "content": first},
        {"role": "assistant", "content": answer.choices[0].message.content},
        {"role": "user", "content": "And then?"},
    ]


def test_a_second_turn_reuses_the_first(server: Server) -> None:
    first = chat(server, [{"role": "user", "content": LONG}])
    assert cached(first) == 0
    second = chat(server, turns(LONG, first))
    assert cached(second) >= first.usage.prompt_tokens
    cold = chat(server, turns(LONG, first), extra_body={"use_kv_cache": False})
    assert cached(cold) == 0
    assert second.choices[0].message.content == cold.choices[0].message.content


def test_a_stream_has_the_same_text(server: Server) -> None:
    messages = [{"role": "user", "content": "Say it slowly. " + LONG}]
    whole = chat(server, messages).choices[0].message.content
    chunks = chat(server, messages, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole


def test_a_completion_has_logprobs(server: Server) -> None:
    answer = client(server).completions.create(
        model="default", prompt=LONG, max_tokens=5, temperature=0, logprobs=2
    )
    assert answer.usage is not None
    merged = LONG.count(
        "th"
    )  # one of the vocabularies has a token for this; otherwise a token is a byte
    assert len(LONG) - merged <= answer.usage.prompt_tokens <= len(LONG)
    assert answer.choices[0].logprobs is not None
    assert len(answer.choices[0].logprobs.tokens or []) == answer.usage.completion_tokens


def test_a_reply_follows_its_schema(server: Server) -> None:
    schema = {"type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"],
              "additionalProperties": False}  # fmt: skip
    answer = chat(
        server,
        [{"role": "user", "content": "Yes or no?"}],
        max_tokens=200,
        response_format={"type": "json_schema", "json_schema": {"name": "yes", "schema": schema}},
    )
    assert answer.choices[0].message.content.replace(" ", "").startswith('{"yes":')


@pytest.mark.parametrize("engine", ["numpy", "mlx"])
def test_a_restarted_server_reuses_state_from_disk(tmp_path: Path, engine: str) -> None:
    with serve(tmp_path, engine) as server:
        first = chat(server, [{"role": "user", "content": LONG}])
        expected = chat(server, turns(LONG, first)).choices[0].message.content
    with serve(tmp_path, engine) as server:
        again = chat(server, turns(LONG, first))
    assert cached(again) >= first.usage.prompt_tokens // 64 * 64
    assert again.model_extra["x_cache"]["tier"] == "disk"
    assert again.choices[0].message.content == expected
