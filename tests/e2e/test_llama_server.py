"""llama.cpp's own endpoints with a real engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.server import running
from tests.support.tiny import CONTROL, CodeModel, write_llama

PROMPT = "the cat sat on the mat"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("native")
    model = write_llama(folder / "code.gguf", context=256, kind=CodeModel)
    flags = ("--threads", "1", "--disk-cache", "0", "--parallel", "2")
    with running(model, folder, *flags) as server, server.client() as client:
        yield client


def ask(client: httpx.Client, path: str = "/completion", **fields: Any) -> Any:
    body = {"prompt": PROMPT, "n_predict": 8, "temperature": 0, "ignore_eos": True, **fields}
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def tokens_of(client: httpx.Client, text: str) -> list[int]:
    return list(client.post("/tokenize", json={"content": text}).json()["tokens"])


def test_a_stream_says_the_same_as_a_whole_answer(client: httpx.Client) -> None:
    whole = ask(client, return_tokens=True, n_probs=3)
    body = {"prompt": PROMPT, "n_predict": 8, "temperature": 0, "ignore_eos": True, "n_probs": 3}
    with client.stream("POST", "/completion", json={**body, "stream": True}) as answer:
        lines = [line for line in answer.iter_lines() if line]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    *parts, last = chunks
    assert "".join(part["content"] for part in parts) == whole["content"]
    assert [token for part in parts for token in part["tokens"]] == whole["tokens"]
    assert all(len(part["completion_probabilities"]) == 1 for part in parts)
    assert last["stop"]
    assert last["tokens_predicted"] == len(whole["tokens"]) == 8


def test_the_same_prompt_in_tokens_and_in_parts_has_the_same_answer(client: httpx.Client) -> None:
    tokens = tokens_of(client, PROMPT)
    begin, rest = tokens_of(client, "the cat "), "sat on the mat"
    assert begin == tokens[: len(begin)]
    answers = ask(client, prompt=[PROMPT, tokens, [*begin, rest], {"prompt_string": PROMPT}])
    assert len({each["content"] for each in answers}) == 1
    assert {each["prompt"] for each in answers} == {PROMPT}


def test_a_later_completion_reuses_the_earlier_prompt(client: httpx.Client) -> None:
    ask(client, prompt=PROMPT * 3)
    again = ask(client, prompt=PROMPT * 3)
    assert again["timings"]["cache_n"] == again["tokens_evaluated"] - 1
    assert ask(client, prompt=PROMPT * 3, cache_prompt=False)["timings"]["cache_n"] == 0


def test_predicting_nothing_warms_up_the_next_request(client: httpx.Client) -> None:
    prompt = "a prompt that somebody is still writing"
    assert ask(client, prompt=prompt, n_predict=0)["content"] == ""
    assert ask(client, prompt=prompt)["timings"]["prompt_n"] == 1


def test_a_gap_is_filled_between_its_prefix_and_its_suffix(client: httpx.Client) -> None:
    """The model's own tokens separate the parts, as its metadata names them."""
    pre, suf, mid = CONTROL
    gap = {"input_prefix": "int a", "input_suffix": "return a;", "prompt": " ="}
    found = ask(client, "/infill", **gap)
    assert found["prompt"] == f"{pre}int a{suf}return a;{mid} ="
    assert len(found["content"]) > 0
    extra = [{"filename": "f.c", "text": "int b;"}]
    shown = ask(client, "/infill", **gap, input_extra=extra)["prompt"]
    assert shown.endswith(f"int b;{pre}int a{suf}return a;{mid} =")


def test_a_reply_that_reaches_the_end_of_the_context_is_truncated(client: httpx.Client) -> None:
    found = ask(client, n_predict=-1)
    assert found["truncated"]
    assert found["tokens_evaluated"] + found["tokens_predicted"] == 256
    assert not ask(client)["truncated"]


def test_a_stop_string_is_named(client: httpx.Client) -> None:
    said = ask(client)["content"]
    found = ask(client, stop=[said[2]])
    assert (found["stop_type"], found["stopping_word"]) == ("word", said[2])


def test_a_chat_can_show_its_prompt_and_its_settings(client: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    shown = client.post("/v1/chat/completions", json={**body, "verbose": True}).json()["__verbose"]
    assert shown["prompt"] == f"{CONTROL[1]}user\nhi{CONTROL[0]}\n{CONTROL[1]}assistant\n"
    assert shown["generation_settings"]["n_predict"] == 2
    assert "__verbose" not in client.post("/v1/chat/completions", json=body).json()
    count = client.post("/v1/chat/completions/input_tokens", json=body).json()["input_tokens"]
    assert count == shown["tokens_evaluated"]


@pytest.mark.parametrize("path", ["/completion", "/v1/chat/completions"])
def test_a_prompt_beyond_the_context_has_its_figures(client: httpx.Client, path: str) -> None:
    text = PROMPT * 40
    body = {"prompt": text, "messages": [{"role": "user", "content": text}]}
    error = client.post(path, json=body).json()["error"]
    assert error["type"] == "exceed_context_size_error"
    assert error["n_ctx"] == 256
    assert error["n_prompt_tokens"] > 256
