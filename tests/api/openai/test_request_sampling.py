"""The sampling fields of vLLM and llama.cpp reach the runtime, and wrong values are refused."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import httpx
import pytest

from tests.api.scripted import Front, error

FIELDS: dict[str, Any] = {
    "typical_p": 0.9,
    "dry_multiplier": 0.8,
    "dry_base": 1.5,
    "dry_allowed_length": 3,
    "dry_penalty_last_n": 64,
    "dry_sequence_breakers": ["\n", "->"],
    "bad_words": ["wrong", " worse"],
    "min_tokens": 4,
}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_chat_and_completions_take_all_of_them(path: str) -> None:
    front = Front()
    prompt = {"messages": [{"role": "user", "content": "hello"}], "prompt": "hello"}
    body = {**prompt, **FIELDS, "stop_token_ids": [5, 6], "truncate_prompt_tokens": 20}
    assert front.post(path, body).status_code == httpx.codes.OK
    request = front.runtime.requested
    sampling = asdict(request.sampling)
    assert {name: sampling[name] for name in FIELDS} == FIELDS
    assert (request.stop_token_ids, request.truncate_prompt_tokens) == ([5, 6], 20)


@pytest.mark.parametrize(
    ("sent", "limit"), [({"n_predict": 7}, 7), ({"n_predict": 7, "max_tokens": 7}, 7)]
)
def test_n_predict_is_another_name_of_max_tokens(sent: dict[str, Any], limit: int) -> None:
    for ask in (front := Front(), Front()):
        ask.chat(**sent)
        assert ask.runtime.requested.max_tokens == limit
    front = Front()
    front.complete(n_predict=-1)
    assert front.runtime.requested.max_tokens is None


def test_the_penalties_of_llamacpp_are_those_of_this_server() -> None:
    front = Front()
    front.chat(repeat_penalty=1.3, repeat_last_n=-1)
    sampling = front.runtime.requested.sampling
    assert (sampling.repetition_penalty, sampling.repetition_context_size) == (1.3, 1 << 20)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"n_predict": 3, "max_tokens": 4}, "n_predict", "alias of `max_tokens`"),
        ({"repeat_penalty": 2, "repetition_penalty": 1}, "repeat_penalty", "alias"),
        ({"typical_p": 0}, "typical_p", "above 0"),
        ({"typical_p": 1.5}, "typical_p", "up to 1"),
        ({"dry_base": 0.5}, "dry_base", "from 1 up"),
        ({"dry_multiplier": -1}, "dry_multiplier", "from 0 up"),
        ({"dry_penalty_last_n": -2}, "dry_penalty_last_n", "from -1 up"),
        ({"dry_sequence_breakers": []}, "dry_sequence_breakers", "a list of 1 to 64 texts"),
        ({"dry_sequence_breakers": [""]}, "dry_sequence_breakers", "a list of 1 to 64 texts"),
        ({"dry_sequence_breakers": ["x"] * 65}, "dry_sequence_breakers", "at most 64"),
        ({"bad_words": "x"}, "bad_words", "a list of at most 128 texts"),
        ({"bad_words": [" "]}, "bad_words", "a list of at most 128 texts"),
        ({"bad_words": ["x"] * 129}, "bad_words", "at most 128"),
        ({"stop_token_ids": ["x"]}, "stop_token_ids", "a list of at most 256 token ids"),
        ({"min_tokens": -1}, "min_tokens", "from 0 up"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "at most 8 tokens"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "from 1 up"),
    ],
)
def test_a_wrong_value_is_refused_by_name(fields: Any, param: str, message: str) -> None:
    response = Front().chat(**fields)
    assert response.status_code == httpx.codes.BAD_REQUEST, response.text
    assert error(response)["param"] == param
    assert message in error(response)["message"]
