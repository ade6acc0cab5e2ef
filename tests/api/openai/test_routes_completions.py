"""POST /v1/completions as OpenAI's own types read it."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types import Completion

from rekindle.protocol.events import Started, TokenLogprob
from rekindle.protocol.requests import Infill
from tests.api.scripted import Front, ScriptedRuntime, chunks, error, events, finished, hit, reply


def log(piece: bytes, score: float = -0.5) -> TokenLogprob:
    return TokenLogprob(piece, score, [(piece, score), (b"other", -2.0)])


def streamed(front: Front, **fields: Any) -> list[dict[str, Any]]:
    """The choices of a stream; OpenAI's type forbids the null reason that OpenAI sends."""
    return [chunk["choices"][0] for chunk in chunks(front.complete(stream=True, **fields))]


def test_a_whole_answer_has_openais_shape() -> None:
    answer = Completion.model_validate(Front().complete().json())
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    [choice] = answer.choices
    assert (choice.index, choice.text, choice.finish_reason) == (0, "Hello", "stop")
    assert choice.logprobs is None
    assert answer.usage is not None
    assert answer.usage.total_tokens == 12


def test_a_stream_is_text_then_a_reason() -> None:
    *texts, last = chunks(Front().complete(stream=True))
    assert [chunk["choices"][0]["text"] for chunk in texts] == ["Hel", "lo"]
    assert {chunk["object"] for chunk in [*texts, last]} == {"text_completion"}
    assert last["choices"][0] == {
        "index": 0,
        "text": "",
        "logprobs": None,
        "finish_reason": "stop",
    }


def test_usage_and_cache_end_a_stream_that_asked_for_them() -> None:
    answer = Front().complete(
        stream=True, stream_options={"include_usage": True}, use_kv_cache=False
    )
    *texts, usage, report, done = events(answer.text)
    assert all(event.json["usage"] is None for event in texts)
    assert usage.json["usage"]["prompt_tokens"] == 10
    assert usage.json["choices"] == []
    assert (report.name, report.json["object"]) == ("x_cache", "text_completion")
    assert done.data == "[DONE]"


@pytest.mark.parametrize(
    ("prompt", "asked"),
    [
        ("one", ["one"]),
        (["one"], ["one"]),
        (["one", "two"], ["one", "two"]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        ("", [""]),
    ],
)
def test_a_prompt_may_be_text_or_tokens_or_a_list_of_either(prompt: Any, asked: list[Any]) -> None:
    front = Front()
    assert front.complete(prompt=prompt).status_code == 200
    assert [request.prompt for request in front.runtime.requests] == asked
    assert all(request.messages is None for request in front.runtime.requests)


def test_the_usage_of_several_prompts_is_their_sum() -> None:
    runtime = ScriptedRuntime(
        *(
            reply("x", end=finished(prompt_tokens=tokens, cache=hit(tokens - 1)))
            for tokens in (10, 10, 20, 20)
        )
    )
    answer = Completion.model_validate(Front(runtime).complete(prompt=["a", "b"], n=2).json())
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [request.prompt for request in runtime.requests] == ["a", "a", "b", "b"]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 30
    assert answer.usage.completion_tokens == 8
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 28


def test_the_cache_report_of_several_prompts_hides_no_miss() -> None:
    runtime = ScriptedRuntime(
        reply("x", end=finished(cache=hit(9))), reply("y", end=finished(prompt_tokens=20))
    )
    report = Front(runtime).complete(prompt=["a", "b"]).json()["x_cache"]
    assert report["status"] == "partial_hit"
    assert report["reused_tokens"] == 9
    assert report["reason"] == "not_cached"
    assert report["tier"] == "ram"


def test_streamed_prompts_keep_their_indexes() -> None:
    runtime = ScriptedRuntime(reply("a", "b"), reply("c"))
    texts = {0: "", 1: ""}
    for choice in streamed(Front(runtime), prompt=["x", "y"]):
        texts[choice["index"]] += choice["text"]
    assert texts == {0: "ab", 1: "c"}


def test_logprobs_have_the_old_shape_with_offsets_into_the_text() -> None:
    logs = [[log(b"Hi")], [log(b" \xe2\x82")], [log(b"\xac"), log(b"!")]]
    runtime = ScriptedRuntime(reply("Hi", "", " €!", logs=logs))
    answer = Completion.model_validate(Front(runtime).complete(logprobs=2).json())
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["Hi", " \ufffd", "\ufffd", "!"]
    assert logprobs.token_logprobs == [-0.5] * 4
    assert logprobs.top_logprobs is not None
    assert logprobs.top_logprobs[0] == {"Hi": -0.5, "other": -2.0}
    assert logprobs.text_offset == [0, 2, 3, 4]


def test_streamed_offsets_go_on_from_chunk_to_chunk() -> None:
    logs = [[log(b"Hi")], [log(b" you")], [log(b"!")]]
    runtime = ScriptedRuntime(reply("Hi", " you", "!", logs=logs))
    found = [choice["logprobs"] for choice in streamed(Front(runtime), logprobs=1)]
    assert [logprobs["text_offset"] for logprobs in found if logprobs] == [[0], [2], [6]]


def test_an_impossible_token_has_a_score_that_json_can_write() -> None:
    runtime = ScriptedRuntime(
        reply("x", logs=[[TokenLogprob(b"x", -0.1, [(b"y", float("-inf"))])]])
    )
    answer = Front(runtime).complete(logprobs=1).json()
    assert answer["choices"][0]["logprobs"]["top_logprobs"] == [{"y": -9999.0}]


@pytest.mark.parametrize(
    ("settings", "fields", "limit"),
    [
        ({}, {}, 100),
        ({"completion_max_tokens": None}, {}, None),
        ({"completion_max_tokens": 7, "max_tokens": 3}, {}, 7),
        ({}, {"max_tokens": 8.0}, 8),
        ({}, {"max_tokens": -1}, None),
    ],
)
def test_a_completion_without_a_limit_is_as_long_as_the_server_is_set_to(
    settings: dict[str, Any], fields: dict[str, Any], limit: int | None
) -> None:
    front = Front(**settings)
    assert front.complete(**fields).is_success
    assert front.runtime.requested.max_tokens == limit


@pytest.mark.parametrize("prompt", ["once", [5, 6]])
@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_begins_with_the_prompt(prompt: Any, *, stream: bool) -> None:
    """A prompt of text is echoed as it was sent, and tokens as their text."""
    script = [Started(0, 10, 0, prompt="<s>five six"), *reply("Hel", "lo")[1:]]
    front = Front(ScriptedRuntime(script))
    if stream:
        text = "".join(each["text"] for each in streamed(front, prompt=prompt, echo=True))
    else:
        text = front.complete(prompt=prompt, echo=True).json()["choices"][0]["text"]
    assert text == ("once" if prompt == "once" else "<s>five six") + "Hello"
    assert front.runtime.requested.returns_prompt


def test_an_echo_has_no_log_probabilities() -> None:
    told = error(Front().complete(echo=True, logprobs=1))
    assert told["param"] == "echo"


def test_a_suffix_makes_the_prompt_the_text_before_a_gap() -> None:
    front = Front()
    assert front.complete(prompt="def f(", suffix="return 1").status_code == 200
    assert front.runtime.requested.prompt == ""
    assert front.runtime.requested.infill == Infill(prefix="def f(", suffix="return 1")
    assert error(front.complete(prompt=[1], suffix="x"))["param"] == "suffix"
    assert Front().complete(suffix="").status_code == 200, "an empty one is none"


def test_the_best_answers_are_the_likeliest_ones() -> None:
    """By the mean log probability of their tokens. All of them count as usage."""
    scripts = [
        reply(text, logs=[[log(text.encode(), score)]])
        for text, score in (("bad", -3.0), ("best", -0.1), ("good", -1.0))
    ]
    front = Front(ScriptedRuntime(*scripts))
    answer = front.complete(best_of=3, n=2).json()
    assert [(each["index"], each["text"]) for each in answer["choices"]] == [
        (0, "best"),
        (1, "good"),
    ]
    assert all(each["logprobs"] is None for each in answer["choices"])
    assert answer["usage"]["completion_tokens"] == 3
    shown = Front(ScriptedRuntime(*scripts)).complete(best_of=3, logprobs=1).json()["choices"]
    assert [each["logprobs"]["tokens"] for each in shown] == [["best"]]


@pytest.mark.parametrize(
    "fields", [{"best_of": 1, "n": 2}, {"best_of": 2, "stream": True}, {"best_of": 0}]
)
def test_a_best_of_that_cannot_be_ranked_is_refused(fields: dict[str, Any]) -> None:
    assert error(Front().complete(**fields))["param"] == "best_of"
