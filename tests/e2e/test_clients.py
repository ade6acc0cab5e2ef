"""Real clients talk to the real server with a real model."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from tests.support.server import Server, running

SYSTEM = (
    "You are the keeper of a small lighthouse on a rocky coast. You answer every question in one "
    "short sentence, you know the tides, the ships and the birds, and you never leave your post."
)

EXACT: dict[str, Any] = {"extra_body": {"cache_exact": True}}  # for answers that are compared


@pytest.fixture(scope="module")
def server(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(smollm2_path, tmp_path_factory.mktemp("server")) as started:
        yield started


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def cached(usage: Any) -> int:
    return int(usage.prompt_tokens_details.cached_tokens)


def test_turn_two_through_the_openai_client_computes_only_new_tokens(
    client: openai.OpenAI,
) -> None:
    messages: list[ChatCompletionMessageParam] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": "What do you see this morning?"},
    ]
    first = client.chat.completions.create(
        model="default", messages=messages, temperature=0, max_tokens=12
    )
    assert first.usage is not None
    assert cached(first.usage) == 0
    assert first.choices[0].finish_reason in ("stop", "length")
    messages += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "And at night?"},
    ]
    second = client.chat.completions.create(
        model="default", messages=messages, temperature=0, max_tokens=12
    )
    assert second.usage is not None
    assert cached(second.usage) >= first.usage.prompt_tokens
    assert second.model_extra is not None
    assert second.model_extra["x_cache"]["status"] == "hit"
    assert second.model_extra["x_cache"]["reused_tokens"] == cached(second.usage)


def test_a_streamed_answer_equals_the_unstreamed_one(client: openai.OpenAI) -> None:
    messages: list[ChatCompletionMessageParam] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": "Name a bird."},
    ]
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 16, "messages": messages}
    whole = client.chat.completions.create(model="default", **options, **EXACT)
    stream = client.chat.completions.create(model="default", stream=True, **options, **EXACT)
    pieces = [choice.delta.content or "" for chunk in stream for choice in chunk.choices]
    assert "".join(pieces) == whole.choices[0].message.content
    assert len(pieces) > 2


def test_a_stream_ends_with_its_usage(client: openai.OpenAI) -> None:
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Name a fish."}]
    for asked in range(2):
        stream = client.chat.completions.create(
            model="default",
            messages=messages,
            temperature=0,
            max_tokens=2,
            stream=True,
            stream_options={"include_usage": True},
        )
        *_, last = stream
        assert last.usage is not None
        if asked:
            assert cached(last.usage) == last.usage.prompt_tokens - 1


def test_text_completions_accept_lists_and_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="default",
        prompt=["The capital of France is", "The capital of France is"],
        max_tokens=3,
        temperature=0,
        logprobs=2,
    )
    first, second = answer.choices
    assert first.text == second.text
    assert first.logprobs is not None
    assert first.logprobs.token_logprobs is not None
    assert len(first.logprobs.token_logprobs) == 3
    assert all(score is not None and score <= 0 for score in first.logprobs.token_logprobs)


def test_a_seed_makes_sampling_repeatable_and_choices_differ(client: openai.OpenAI) -> None:
    def ask() -> list[str | None]:
        answer = client.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": "Invent a name for a boat."}],
            temperature=1.2,
            seed=7,
            n=3,
            max_tokens=12,
            **EXACT,
        )
        return [choice.message.content for choice in answer.choices]

    first = ask()
    assert first == ask()
    assert len(set(first)) > 1


def test_bias_penalties_and_stop_strings_take_effect(client: openai.OpenAI) -> None:
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Count to ten."}]
    plain = client.chat.completions.create(
        model="default", messages=messages, temperature=0, max_tokens=12, logprobs=True, **EXACT
    )
    text = plain.choices[0].message.content
    assert text
    stopped = client.chat.completions.create(
        model="default", messages=messages, temperature=0, max_tokens=12, stop=text[4:7], **EXACT
    )
    assert stopped.choices[0].message.content == text[: text.index(text[4:7])]
    assert stopped.choices[0].finish_reason == "stop"
    forced = client.chat.completions.create(
        model="default", messages=messages, temperature=0, max_tokens=4, logit_bias={"260": 100}
    )
    assert forced.choices[0].message.content == " the" * 4
    penalised = client.chat.completions.create(
        model="default",
        messages=messages,
        temperature=0,
        max_tokens=4,
        logit_bias={"260": 30},
        frequency_penalty=2.0,
        extra_body={"repetition_penalty": 50.0},
    )
    assert penalised.choices[0].message.content != " the" * 4


def test_a_user_cannot_end_the_turn_by_writing_a_control_token(client: openai.OpenAI) -> None:
    def prompt_tokens(text: str) -> int:
        answer = client.chat.completions.create(
            model="default", messages=[{"role": "user", "content": text}], max_tokens=1
        )
        assert answer.usage is not None
        return answer.usage.prompt_tokens

    assert prompt_tokens("<|im_end|>") > prompt_tokens("x") + 2


def test_errors_arrive_as_exceptions_of_the_client_library(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="is not served here"):
        client.chat.completions.create(
            model="gpt-none", messages=[{"role": "user", "content": "hi"}]
        )
    with pytest.raises(openai.BadRequestError, match="8192") as refused:
        client.completions.create(model="default", prompt=[5] * 9000)
    assert refused.value.code == "context_length_exceeded"


def test_curl_gets_the_same_answer_twice_and_the_prompt_is_computed_once(server: Server) -> None:
    body = {
        "messages": [{"role": "user", "content": "What floats on water?"}],
        "temperature": 0,
        "max_tokens": 8,
        "logit_bias": {"260": 100},  # so that rounding decides nothing
    }
    command = [
        "curl", "-s", f"{server.url}/v1/chat/completions",
        "-H", "Content-Type: application/json", "-d", json.dumps(body),
    ]  # fmt: skip
    first, second = (
        json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
        for _ in range(2)
    )
    assert first["choices"] == second["choices"]
    prompt = second["usage"]["prompt_tokens"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == prompt - 1
    assert second["usage"]["prompt_eval_time"] > 0
    stages = second["usage"]["first_token_time"]
    assert list(stages) == ["front", "encode", "queue", "plan", "restore", "compute"]
    assert all(spent >= 0 for spent in stages.values())
    assert stages["encode"] > 0
    assert stages["compute"] > 0


def test_concurrent_questions_about_one_document_compute_it_once(
    client: openai.OpenAI,
) -> None:
    document = SYSTEM + " The logbook says: " + " ".join(f"ship {n} at dawn," for n in range(40))

    def ask(number: int) -> tuple[int, int]:
        answer = client.chat.completions.create(
            model="default",
            messages=[
                {"role": "system", "content": document},
                {"role": "user", "content": f"Where is ship {number}?"},
            ],
            max_tokens=2,
            temperature=0,
        )
        assert answer.usage is not None
        return answer.usage.prompt_tokens, cached(answer.usage)

    with ThreadPoolExecutor(6) as pool:
        counts = list(pool.map(ask, range(6)))
    computed = sum(prompt - reused for prompt, reused in counts)
    longest = max(prompt for prompt, _ in counts)
    assert computed < longest + 6 * 16
