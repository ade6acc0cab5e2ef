"""A failed turn answers with a status if nothing was sent yet, and with an event after that."""

from __future__ import annotations

import logging

import pytest

from rekindle.errors import CompileTimeSpent, ServerError, TooManyRequests, Unavailable
from rekindle.protocol.events import Cancelled, Failed, Prefill, Started
from tests.api.scripted import (
    Front,
    Pause,
    ScriptedRuntime,
    Step,
    delta,
    error,
    events,
    failed,
    finished,
    reply,
)

DIED = failed(503, "server_error", "model_restarting", "the process died")
TOO_LONG = failed(
    400, "invalid_request_error", "context_length_exceeded", "9000 of 4096", param="messages"
)


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_keeps_its_status_code_and_field(stream: bool) -> None:
    answer = Front(ScriptedRuntime([TOO_LONG])).chat(stream=stream)
    assert answer.status_code == 400
    assert error(answer) == {
        "message": "9000 of 4096",
        "type": "invalid_request_error",
        "param": "messages",
        "code": "context_length_exceeded",
    }


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "begin", [[], [Started(0, 10, 0)], [Started(0, 10, 0), Prefill(0, 5, 10)]], ids=len
)
def test_a_failure_before_the_first_text_is_a_status(begin: list[Step], stream: bool) -> None:
    answer = Front(ScriptedRuntime([*begin, DIED])).chat(stream=stream)
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    assert error(answer)["code"] == "model_restarting"


def test_a_failure_in_mid_stream_is_the_last_event() -> None:
    answer = Front(ScriptedRuntime(reply("Hel", end=DIED))).chat(
        stream=True, stream_options={"include_usage": True}, use_kv_cache=True
    )
    assert answer.status_code == 200
    *_, text, failed, done = events(answer.text)
    assert text.json["choices"][0]["delta"]["content"] == "Hel"
    assert failed.json == {
        "error": {
            "message": "the process died",
            "type": "server_error",
            "param": None,
            "code": "model_restarting",
        }
    }
    assert done.data == "[DONE]"


def test_a_failure_of_an_unstreamed_reply_is_a_status() -> None:
    assert Front(ScriptedRuntime(reply("Hel", end=DIED))).chat().status_code == 503


def test_after_a_progress_event_a_failure_is_an_event() -> None:
    script: list[Step] = [Started(0, 10, 0), DIED]
    answer = Front(ScriptedRuntime(script)).chat(stream=True, prefill_progress=True)
    assert answer.status_code == 200
    *_, failed, done = events(answer.text)
    assert failed.json["error"]["code"] == "model_restarting"
    assert done.data == "[DONE]"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("problem", "status"),
    [(TooManyRequests("272 requests are queued"), 429), (Unavailable("it is loading"), 503)],
)
def test_a_full_or_absent_runtime_says_when_to_retry(
    problem: ServerError, status: int, stream: bool
) -> None:
    answer = Front(ScriptedRuntime([problem])).chat(stream=stream)
    assert answer.status_code == status
    assert answer.headers["retry-after"] == "1"
    assert error(answer)["message"] == str(problem)


@pytest.mark.parametrize("stream", [False, True])
def test_one_failed_choice_fails_the_request_and_cancels_the_others(stream: bool) -> None:
    runtime = ScriptedRuntime([Started(0, 10, 0), Pause()], [TOO_LONG])
    assert Front(runtime).chat(n=2, stream=stream).status_code == 400
    assert (runtime.open_turns, runtime.cancelled_turns) == (0, 1)


# Not a string, so any code that handles it raises an unexpected exception.
BUG = delta(RuntimeError("a secret detail"))  # type: ignore[arg-type]


def test_a_bug_is_logged_and_its_details_are_not_sent_to_the_client(
    caplog: pytest.LogCaptureFixture,
) -> None:
    runtime = ScriptedRuntime([Started(0, 10, 0), BUG, finished()])
    with caplog.at_level(logging.ERROR, "rekindle.api"):
        answer = Front(runtime).chat()
    assert answer.status_code == 500
    assert error(answer)["code"] == "internal_error"
    assert "secret" not in answer.text
    assert "unexpected error" in caplog.text


def test_a_bug_in_mid_stream_is_logged_and_ends_the_stream_with_an_event(
    caplog: pytest.LogCaptureFixture,
) -> None:
    runtime = ScriptedRuntime([Started(0, 10, 0), delta("x"), BUG])
    with caplog.at_level(logging.ERROR, "rekindle.api"):
        answer = Front(runtime).chat(stream=True)
    *_, failed, done = events(answer.text)
    assert failed.json["error"]["code"] == "internal_error"
    assert "secret" not in answer.text
    assert done.data == "[DONE]"
    assert "unexpected error in a stream" in caplog.text


def test_neither_prompt_nor_key_appears_in_a_log_or_an_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    front = Front(ScriptedRuntime([DIED], [BUG, finished()], [finished()]), api_key=["canary-key"])
    bodies = [
        {"messages": [{"role": "user", "content": "canary-prompt"}]},
        {"messages": [{"role": "user", "content": "canary-prompt"}], "temperature": "canary-value"},
        {"messages": [{"role": "canary-role", "content": "canary-prompt"}]},
        {"messages": "canary-prompt"},
    ]
    with caplog.at_level(logging.INFO):
        for key in ("canary-key", "canary-wrong"):
            headers = {"Authorization": f"Bearer {key}"}
            for body in bodies:
                answer = front.post("/v1/chat/completions", body, headers=headers)
                assert "canary" not in answer.text
    assert "canary" not in caplog.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("begun", [False, True])
def test_a_turn_that_the_server_cancels_ends_with_an_error(stream: bool, begun: bool) -> None:
    script: list[Step] = [Started(0, 10, 0), *([delta("x")] if begun else []), Cancelled(0)]
    answer = Front(ScriptedRuntime(script)).chat(stream=stream)
    if stream and begun:
        assert "send it again" in answer.text
    else:
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"


def test_a_tenant_that_has_used_up_its_compile_time_is_told_how_long_to_wait() -> None:
    spent = CompileTimeSpent(compile_s=20.0, period_s=60.0, wait_s=12.3)
    answer = Front(ScriptedRuntime([Failed(0, spent.info)])).chat()
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "13")
    assert "Try again in 13 s" in error(answer)["message"]
