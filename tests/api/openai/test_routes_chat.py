"""POST /v1/chat/completions as OpenAI's own types read it."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from rekindle.protocol.events import CacheReport, Prefill, Reason, Started, TokenLogprob
from tests.api.scripted import (
    Front,
    ScriptedRuntime,
    Step,
    chunks,
    delta,
    events,
    finished,
    hit,
    reply,
)

LOGS = [
    [TokenLogprob(b"Hel", -0.5, [(b"Hel", -0.5), (b"\xf0\x9f", -1.5)])],
    [TokenLogprob(b"lo", float("-inf"), [])],
]


def parsed(body: dict[str, Any]) -> ChatCompletion:
    return ChatCompletion.model_validate(body)


def parsed_chunks(front: Front, **fields: Any) -> list[ChatCompletionChunk]:
    answer = front.chat(stream=True, **fields)
    return [ChatCompletionChunk.model_validate(chunk) for chunk in chunks(answer)]


def test_a_whole_answer_has_openais_shape() -> None:
    answer = parsed(Front().chat().json())
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == "tiny"
    [choice] = answer.choices
    assert choice.index == 0
    assert choice.message.role == "assistant"
    assert choice.message.content == "Hello"
    assert choice.finish_reason == "stop"
    assert choice.logprobs is None


def test_every_answer_has_its_own_id() -> None:
    front = Front()
    assert front.chat().json()["id"] != front.chat().json()["id"]


def test_usage_reports_reused_tokens_and_prompt_time() -> None:
    runtime = ScriptedRuntime(reply("x", end=finished(prompt_tokens=50, cache=hit(40))))
    usage = Front(runtime).chat().json()["usage"]
    assert usage == {
        "prompt_tokens": 50,
        "completion_tokens": 2,
        "total_tokens": 52,
        "prompt_tokens_details": {"cached_tokens": 40},
        "completion_tokens_details": {"reasoning_tokens": 0},
        "prompt_eval_time": 0.25,
    }


def test_a_stream_is_a_role_then_text_then_a_reason() -> None:
    first, *texts, last = parsed_chunks(Front())
    assert first.choices[0].delta.role == "assistant"
    assert first.choices[0].delta.content == ""
    assert [chunk.choices[0].delta.content for chunk in texts] == ["Hel", "lo"]
    assert all(chunk.choices[0].finish_reason is None for chunk in [first, *texts])
    assert last.choices[0].finish_reason == "stop"
    assert last.choices[0].delta.content is None
    assert {chunk.object for chunk in [first, *texts, last]} == {"chat.completion.chunk"}
    assert len({(chunk.id, chunk.created) for chunk in [first, *texts, last]}) == 1


def test_an_empty_reply_is_an_answer_too() -> None:
    runtime = ScriptedRuntime(reply(end=finished(completion_tokens=0)))
    assert Front(runtime).chat().json()["choices"][0]["message"]["content"] == ""
    first, last = parsed_chunks(Front(runtime))
    assert first.choices[0].delta.role == "assistant"
    assert last.choices[0].finish_reason == "stop"


def test_the_token_limit_is_the_stop_reason() -> None:
    runtime = ScriptedRuntime(reply("x", end=finished("length")))
    assert Front(runtime).chat().json()["choices"][0]["finish_reason"] == "length"
    assert parsed_chunks(Front(runtime))[-1].choices[0].finish_reason == "length"


def test_a_stream_says_nothing_about_usage_unless_asked() -> None:
    assert all("usage" not in chunk for chunk in chunks(Front().chat(stream=True)))


def test_usage_comes_in_a_last_chunk_of_its_own() -> None:
    answer = Front().chat(stream=True, stream_options={"include_usage": True})
    *others, last = chunks(answer)
    assert all(chunk["usage"] is None for chunk in others)
    assert last["choices"] == []
    usage = ChatCompletionChunk.model_validate(last).usage
    assert usage is not None
    assert usage.total_tokens == 12


def test_several_choices_share_a_prompt_that_counts_once() -> None:
    runtime = ScriptedRuntime(
        reply("one", end=finished(completion_tokens=1)),
        reply("two", end=finished("length", completion_tokens=2)),
        reply("three", end=finished(completion_tokens=3)),
    )
    answer = parsed(Front(runtime).chat(n=3).json())
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.message.content for choice in answer.choices] == ["one", "two", "three"]
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "length", "stop"]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (10, 6)


def test_streamed_choices_each_open_speak_and_close() -> None:
    runtime = ScriptedRuntime(reply("a", "b"), reply("c"))
    answer = parsed_chunks(Front(runtime), n=2, stream_options={"include_usage": True})
    *parts, usage = answer
    for index, text in enumerate(("ab", "c")):
        mine = [part.choices[0] for part in parts if part.choices[0].index == index]
        assert mine[0].delta.role == "assistant"
        assert "".join(choice.delta.content or "" for choice in mine) == text
        assert mine[-1].finish_reason == "stop"
    assert usage.usage is not None
    assert usage.usage.prompt_tokens == 10
    assert usage.usage.completion_tokens == 3


def test_logprobs_come_with_bytes_and_alternatives() -> None:
    runtime = ScriptedRuntime(reply("Hel", "lo", logs=LOGS))
    answer = parsed(Front(runtime).chat(logprobs=True, top_logprobs=2).json())
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    first, second = logprobs.content
    assert (first.token, first.logprob, first.bytes) == ("Hel", -0.5, list(b"Hel"))
    assert [top.token for top in first.top_logprobs] == ["Hel", "\ufffd"]
    assert first.top_logprobs[1].bytes == [0xF0, 0x9F]
    assert second.logprob == -9999.0


def test_streamed_logprobs_come_with_their_text() -> None:
    runtime = ScriptedRuntime(reply("Hel", "lo", logs=LOGS))
    _, first, second, last = parsed_chunks(Front(runtime), logprobs=True, top_logprobs=2)
    for chunk, piece in ((first, "Hel"), (second, "lo")):
        logprobs = chunk.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.content is not None
        assert [token.token for token in logprobs.content] == [piece]
    assert last.choices[0].logprobs is None


def test_x_cache_is_in_every_whole_answer() -> None:
    report = CacheReport("partial_hit", Reason.TURN_CHANGED, 30, 42, "device")
    runtime = ScriptedRuntime(reply("x", end=finished(prompt_tokens=50, cache=report)))
    assert Front(runtime).chat().json()["x_cache"] == {
        "hit": True,
        "status": "partial_hit",
        "cache_key": None,
        "reused_tokens": 30,
        "new_cache_key": None,
        "cached_tokens": 42,
        "reason": "turn_changed",
        "tier": "device",
        "kv_bits": None,
    }
    assert Front().chat().json()["x_cache"]["hit"] is False


@pytest.mark.parametrize("field", ["use_kv_cache", "cache_exact"])
@pytest.mark.parametrize("value", [True, False])
def test_a_stream_tells_about_the_cache_when_a_cache_field_was_sent(
    field: str, value: bool
) -> None:
    fields: dict[str, Any] = {"stream_options": {"include_usage": True}, field: value}
    answer = Front().chat(stream=True, **fields)
    *_, usage, report, done = events(answer.text)
    assert usage.json["usage"]
    assert report.name == "x_cache"
    assert done.data == "[DONE]"
    assert report.json["status"] == "miss"
    assert report.json["reused_tokens"] == 0
    chunk = ChatCompletionChunk.model_validate(report.json)
    assert chunk.object == "chat.completion.chunk"
    [choice] = chunk.choices
    assert not choice.delta.model_fields_set


def test_a_stream_does_not_tell_about_the_cache_unasked() -> None:
    answer = Front().chat(stream=True)
    assert all(event.name is None for event in events(answer.text))


def test_progress_through_the_prompt_is_streamed_when_asked_for() -> None:
    script: list[Step] = [Started(0, 100, 40), Prefill(0, 80, 100), delta("x"), finished()]
    answer = Front(ScriptedRuntime(script)).chat(stream=True, prefill_progress=True)
    progress = [
        chunk["prefill_progress"] for chunk in chunks(answer) if "prefill_progress" in chunk
    ]
    assert progress == [
        {"done_tokens": 40, "prompt_tokens": 100},
        {"done_tokens": 80, "prompt_tokens": 100},
    ]
    silent = Front(ScriptedRuntime(script)).chat(stream=True)
    assert all("prefill_progress" not in chunk for chunk in chunks(silent))


def test_a_stream_is_neither_cached_nor_buffered_on_its_way() -> None:
    headers = Front().chat(stream=True).headers
    assert headers["cache-control"] == "no-cache"
    assert headers["x-accel-buffering"] == "no"
    assert "content-length" not in headers


def test_a_finish_without_text_ends_the_stream() -> None:
    """The only event may be the last one."""
    _, last = parsed_chunks(Front(ScriptedRuntime([finished(completion_tokens=0)])))
    assert last.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_a_finished_turn_is_one_line_of_the_log(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = ScriptedRuntime(reply("Hel", "lo", end=finished(prompt_tokens=50, cache=hit(40))))
    with caplog.at_level(logging.INFO, "rekindle.request"):
        Front(runtime).chat(stream=stream)
    [line] = [record.getMessage() for record in caplog.records if record.name == "rekindle.request"]
    assert line.startswith("tiny POST /v1/chat/completions 200: prompt 50 (40 reused from ram), ")
    assert "output 2" in line
    assert "stop=stop" in line
    assert "Hello" not in line
    assert "hello" not in line
