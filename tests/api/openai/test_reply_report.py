"""`x_cache` in answers, and ids of messages."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from rekindle.protocol.events import CacheReport, Divergence, Finished, Reason, Stages
from tests.api.cache.entries import entry, holding
from tests.api.scripted import Front, ScriptedRuntime, chunks, events, finished, reply

EDITED = CacheReport(
    "partial_hit",
    Reason.TURN_CHANGED,
    1851,
    1958,
    "disk",
    cache_key="abc123",
    new_cache_key="def456",
    diverged_at=Divergence(2, "user", "our top risks", "our top chances"),
)
REPORT = {
    "hit": True,
    "status": "partial_hit",
    "cache_key": "abc123",
    "reused_tokens": 1851,
    "new_cache_key": "def456",
    "cached_tokens": 1958,
    "reason": "turn_changed",
    "tier": "disk",
    "kv_bits": None,
    "diverged_at": {
        "message": 2,
        "role": "user",
        "stored": "our top risks",
        "sent": "our top chances",
    },
}


def runtime_reporting(report: CacheReport, **options: Any) -> ScriptedRuntime:
    return ScriptedRuntime(reply("x", end=finished(cache=report)), **options)


def not_found() -> CacheReport:
    return CacheReport("miss", Reason.CACHE_KEY_NOT_FOUND, 0, 12, None)


def test_a_whole_answer_reports_whether_the_key_was_hit() -> None:
    front = Front(runtime_reporting(EDITED))
    assert front.chat().json()["x_cache"] == REPORT
    assert front.complete().json()["x_cache"] == REPORT


def test_tools_of_llama_cpps_server_find_its_timings() -> None:
    end = structs.replace(
        finished(cache=EDITED), prompt_tokens=1951, completion_tokens=4, prompt_eval_s=0.5
    )
    end.completion_s = 0.2
    front = Front(ScriptedRuntime(reply("x", end=end)))
    expected = {
        "cache_n": 1851,
        "prompt_n": 100,
        "prompt_ms": 500.0,
        "prompt_per_token_ms": 5.0,
        "prompt_per_second": 200.0,
        "predicted_n": 4,
        "predicted_ms": 200.0,
        # The first token comes with the prompt, so three tokens took this time.
        "predicted_per_token_ms": 66.666667,
        "predicted_per_second": 15.0,
    }
    assert front.chat().json()["timings"] == expected
    last = [each for each in chunks(front.chat(stream=True)) if each.get("timings")]
    assert [each["timings"] for each in last] == [expected]


def test_nothing_is_said_of_a_place_where_nothing_diverged() -> None:
    assert "diverged_at" not in Front().chat().json()["x_cache"]


@pytest.mark.parametrize("path", ["chat", "complete"])
def test_normalisation_is_reported_if_it_changed_something(path: str) -> None:
    changed = CacheReport("hit", Reason.FULL_MATCH, 9, 12, "ram", normalised=["billing header"])
    report = getattr(Front(runtime_reporting(changed)), path)(n=2).json()["x_cache"]
    assert report["normalised"] == ["billing header"]
    assert "normalised" not in getattr(Front(), path)().json()["x_cache"]


@pytest.mark.parametrize(
    "fields",
    [
        {"cache_key": "abc123"},
        {"return_cache_key": True},
        {"session_id": "s"},
        {"kv_cache_session_id": 0},
        {"prompt_cache_key": "p"},
        {"prompt_cache_retention": "24h"},
        {"use_kv_cache": True},
    ],
    ids=lambda fields: next(iter(fields)),
)
@pytest.mark.parametrize("path", ["chat", "complete"])
def test_a_stream_ends_with_the_same_report_flat_and_as_a_chunk(
    path: str, fields: dict[str, Any]
) -> None:
    front = Front(runtime_reporting(EDITED))
    answer = getattr(front, path)(stream=True, **fields)
    *_, report, done = events(answer.text)
    assert (report.name, done.data) == ("x_cache", "[DONE]")
    assert {name: report.json[name] for name in REPORT} == REPORT
    [choice] = report.json["choices"]
    assert (choice["index"], choice["finish_reason"]) == (0, None)
    assert choice.get("delta", choice.get("text")) in ({}, "")
    assert report.json["object"] in ("chat.completion.chunk", "text_completion")


def test_the_first_choice_speaks_for_all() -> None:
    second = CacheReport("hit", Reason.FULL_MATCH, 9, 12, "device")
    runtime = ScriptedRuntime(
        reply("a", end=finished(cache=EDITED)), reply("b", end=finished(cache=second))
    )
    assert Front(runtime).chat(n=2, cache_key="abc123").json()["x_cache"] == REPORT


@pytest.mark.parametrize("stream", [False, True])
def test_each_reply_has_its_id_when_it_was_asked_for(stream: bool) -> None:
    runtime = ScriptedRuntime(
        reply("a", end=finished(message_id="msg_1")), reply("b", end=finished(message_id="msg_2"))
    )
    answer = Front(runtime).chat(n=2, use_kv_cache=True, stream=stream)
    if stream:
        found = [chunk["choices"][0] for chunk in chunks(answer) if chunk["choices"]]
        ids = {
            choice["index"]: choice["delta"]["message_id"]
            for choice in found
            if choice["finish_reason"]
        }
        assert all("message_id" not in c["delta"] for c in found if not c["finish_reason"])
        [ChatCompletionChunk.model_validate(chunk) for chunk in chunks(answer)]
    else:
        ids = {c["index"]: c["message"]["message_id"] for c in answer.json()["choices"]}
        ChatCompletion.model_validate(answer.json())
    assert ids == {0: "msg_1", 1: "msg_2"}


def test_a_reply_has_no_id_otherwise() -> None:
    assert "message_id" not in Front().chat().json()["choices"][0]["message"]
    assert chunks(Front().chat(stream=True))[-1]["choices"][0]["delta"] == {}


@pytest.mark.parametrize("path", ["chat", "complete"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_key_of_another_model_is_reported_as_a_model_mismatch(path: str, stream: bool) -> None:
    other = ScriptedRuntime(name="other", answers=holding(entry("k")))
    front = Front(runtime_reporting(not_found()), other, api_key=["alpha"])
    answer = getattr(front, path)(
        cache_key="k", stream=stream, headers={"Authorization": "Bearer alpha"}
    )
    report = events(answer.text)[-2].json if stream else answer.json()["x_cache"]
    assert (report["status"], report["reason"]) == ("miss", "model_mismatch")
    assert other.admin_request.salt == front.runtime.requested.salt != b""
    assert not other.admin_request.admin


def test_a_key_that_no_model_knows_is_not_found() -> None:
    others = [ScriptedRuntime(name="b"), ScriptedRuntime(name="c")]
    others[0].supervisor.ready = None
    answer = Front(runtime_reporting(not_found()), *others).chat(cache_key="k")
    assert answer.json()["x_cache"]["reason"] == "cache_key_not_found"
    assert len(others[1].admin_requests) == 1


def test_other_models_are_asked_about_nothing_else() -> None:
    other = ScriptedRuntime(name="other", answers=holding(entry("k")))
    answer = Front(runtime_reporting(EDITED), other).chat(cache_key="k")
    assert answer.json()["x_cache"]["reason"] == "turn_changed"
    assert other.admin_requests == []


# -- the time to the first token -----------------------------------------------------------------

STAGES = Stages(front=0.001, encode=0.002, queue=0.0, plan=0.003, restore=0.004, compute=0.5)


def timed() -> Finished:
    return structs.replace(finished(), stages=STAGES, first_token_at_s=0.0)


def test_usage_tells_where_the_time_to_the_first_token_went() -> None:
    told = Front(ScriptedRuntime(reply("x", end=timed()))).chat().json()["usage"]
    assert told["first_token_time"] == {
        "front": 0.001,
        "encode": 0.002,
        "queue": 0.0,
        "plan": 0.003,
        "restore": 0.004,
        "compute": 0.5,
    }


def test_a_stream_tells_when_the_first_byte_followed() -> None:
    front = Front(ScriptedRuntime(reply("x", end=timed())))
    answer = front.chat(stream=True, stream_options={"include_usage": True})
    usage = chunks(answer)[-1]["usage"]
    assert usage["first_token_time"]["first_byte"] > 0  # on a clock that began before
    assert usage["first_token_time"]["compute"] == 0.5


def test_a_turn_without_stages_has_none_in_its_usage() -> None:
    assert "first_token_time" not in Front(ScriptedRuntime(reply("x"))).chat().json()["usage"]
