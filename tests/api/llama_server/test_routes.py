"""llama.cpp's own endpoints, as its clients use them."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from rekindle.protocol.events import Delta, Embedded, Prefill, Started, TextDelta, TokenLogprob
from rekindle.protocol.frames import Ready
from rekindle.protocol.requests import ExtraFile, Infill
from tests.api.scripted import Front, ScriptedRuntime, Step, events, failed, finished

TOKENS = {7: b"Hel", 8: b"lo"}


def delta(*tokens: int, logged: bool = False) -> Delta:
    """A part as a runtime sends it to a client that wants tokens."""
    logs = [
        TokenLogprob(TOKENS[each], -0.5, [(TOKENS[each], -0.5), (b"x", -2.0)], each, [each, 9])
        for each in tokens
    ]
    text = b"".join(TOKENS[each] for each in tokens).decode()
    return Delta(0, TextDelta(text, logs if logged else None, list(tokens)))


def hello(*parts: Delta, end: Step | None = None) -> Front:
    started = Started(0, 10, 4, prompt="<s>hello")
    script: list[Step] = [started, *(parts or (delta(7), delta(8))), end or finished()]
    return Front(ScriptedRuntime(script))


def complete(front: Front, **fields: Any) -> Any:
    answer = front.post("/completion", {"prompt": "hello", **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def streamed(front: Front, path: str = "/completion", **fields: Any) -> list[dict[str, Any]]:
    answer = front.post(path, {"prompt": "hello", "stream": True, **fields})
    assert answer.headers["content-type"].startswith("text/event-stream")
    return [event.json for event in events(answer.text)]


def refusal(front: Front, path: str = "/completion", **fields: Any) -> dict[str, Any]:
    answer = front.post(path, {"prompt": "hello", **fields})
    error: dict[str, Any] = answer.json()["error"]
    assert error["code"] == answer.status_code
    return error


def test_a_whole_answer_has_the_fields_of_llama_cpp() -> None:
    found = complete(hello(), return_tokens=True)
    assert (found["content"], found["tokens"], found["stop"]) == ("Hello", [7, 8], True)
    assert (found["tokens_predicted"], found["tokens_evaluated"]) == (2, 10)
    assert (found["stop_type"], found["stopping_word"], found["truncated"]) == ("eos", "", False)
    assert (found["prompt"], found["model"], found["index"]) == ("<s>hello", "tiny", 0)
    assert found["timings"]["predicted_n"] == 2
    assert "completion_probabilities" not in found


def test_tokens_come_only_if_asked_for() -> None:
    front = hello()
    assert complete(front)["tokens"] == []
    assert not front.runtime.requested.returns_tokens


def test_a_stream_is_parts_and_one_last_object_with_everything() -> None:
    first, second, last = streamed(hello())
    assert (first["content"], first["tokens"], first["stop"]) == ("Hel", [7], False)
    assert (second["content"], second["tokens_predicted"]) == ("lo", 2)
    assert (last["content"], last["stop"], last["tokens_evaluated"]) == ("", True, 10)
    assert last["generation_settings"]["stream"] is True


@pytest.mark.parametrize("stream", [False, True])
def test_probabilities_name_each_token_and_the_best_ones(*, stream: bool) -> None:
    """A stream sends one token in each part, even if they arrive together."""
    front = hello(delta(7, 8, logged=True))
    fields: dict[str, Any] = {"n_probs": 2}
    found = (
        [each["completion_probabilities"] for each in streamed(front, **fields)[:-1]]
        if stream
        else [[each] for each in complete(front, **fields)["completion_probabilities"]]
    )
    assert [[each["id"] for each in part] for part in found] == [[7], [8]]
    assert found[0][0] == {
        "id": 7,
        "token": "Hel",
        "bytes": [72, 101, 108],
        "logprob": -0.5,
        "top_logprobs": [
            {"id": 7, "token": "Hel", "bytes": [72, 101, 108], "logprob": -0.5},
            {"id": 9, "token": "x", "bytes": [120], "logprob": -2.0},
        ],
    }
    assert front.runtime.requested.sampling.top_logprobs == 2


@pytest.mark.parametrize(
    ("prompt", "asked"),
    [
        ("one", ["one"]),
        ([1, 2], [[1, 2]]),
        (["one", 2], [["one", 2]]),
        ({"prompt_string": "one"}, ["one"]),
        (["one", "two"], ["one", "two"]),
        (["one", [1, "x"], {"prompt_string": "two"}], ["one", [1, "x"], "two"]),
    ],
)
def test_a_prompt_may_mix_texts_and_tokens(prompt: Any, asked: list[Any]) -> None:
    front = Front()
    found = complete(front, prompt=prompt)
    assert [request.prompt for request in front.runtime.requests] == asked
    assert isinstance(found, list) == (len(asked) > 1)


@pytest.mark.parametrize("prompt", [[], [[]], None, 7, {"text": "x"}, [True], [None, 1]])
def test_another_prompt_is_refused_in_the_shape_of_llama_cpp(prompt: Any) -> None:
    front = Front()
    error = refusal(front, prompt=prompt)
    assert (error["code"], error["type"]) == (400, "invalid_request_error")
    assert "prompt" in error["message"]
    assert front.runtime.requests == []


def test_images_are_refused_with_a_hint() -> None:
    prompt = {"prompt_string": "<__media__>", "multimodal_data": ["aGk="]}
    assert "/v1/chat/completions" in refusal(Front(), prompt=prompt)["message"]


@pytest.mark.parametrize(
    ("bias", "ids", "texts"),
    [
        ([[5, 1.5], ["the", -2]], {5: 1.5}, [("the", -2.0)]),
        ({"5": 1.5, "the": -2}, {5: 1.5}, [("the", -2.0)]),
        ([[5, False]], {5: float("-inf")}, []),
    ],
)
def test_a_bias_may_be_of_a_token_or_of_a_text(bias: Any, ids: Any, texts: Any) -> None:
    front = Front()
    shown = complete(front, logit_bias=bias)["generation_settings"]["logit_bias"]
    sampling = front.runtime.requested.sampling
    assert (dict(sampling.logit_bias), list(sampling.text_bias)) == (ids, texts)
    values = [None if value == float("-inf") else value for value in ids.values()]
    assert [each["bias"] for each in shown] == values


@pytest.mark.parametrize("bias", [7, [[5]], [[5, 1000]], [[None, 1]], {"5": "x"}])
def test_another_bias_is_refused(bias: Any) -> None:
    assert "logit_bias" in refusal(Front(), logit_bias=bias)["message"]


def test_the_fields_of_an_answer_can_be_chosen() -> None:
    fields = ["content", "generation_settings/n_predict", "no/such", "timings/predicted_n"]
    front = hello()
    found = complete(front, response_fields=fields, n_predict=5)
    assert found == {
        "content": "Hello",
        "generation_settings/n_predict": 5,
        "timings/predicted_n": 2,
    }
    assert not front.runtime.requested.returns_prompt, "nobody asked for it"


def test_predicting_nothing_reads_the_prompt_and_returns_no_text() -> None:
    """Editors send it to warm up the cache while somebody types."""
    front = hello(delta(7), end=finished("length", completion_tokens=1))
    found = complete(front, n_predict=0, return_tokens=True)
    assert (found["content"], found["tokens"], found["tokens_predicted"]) == ("", [], 0)
    assert (found["stop_type"], found["timings"]["predicted_n"]) == ("limit", 0)
    assert front.runtime.requested.max_tokens == 1
    assert [each["content"] for each in streamed(hello(), n_predict=0)] == [""]


@pytest.mark.parametrize(
    ("settings", "n_predict", "limit"),
    [
        ({}, None, None),
        ({}, 5, 5),
        ({}, -1, None),
        ({}, -2, None),
        ({"completion_max_tokens": 64, "given": {"completion_max_tokens": "a flag"}}, None, 64),
    ],
)
def test_a_completion_has_no_limit_unless_somebody_sets_one(
    settings: dict[str, Any], n_predict: int | None, limit: int | None
) -> None:
    front = Front(**settings)
    complete(front, **({} if n_predict is None else {"n_predict": n_predict}))
    assert front.runtime.requested.max_tokens == limit


def test_a_reply_that_fills_the_context_is_truncated() -> None:
    whole = finished("length", prompt_tokens=4000, completion_tokens=96)
    assert complete(hello(end=whole))["truncated"] is True
    assert complete(hello(end=finished("length")))["truncated"] is False


def test_what_an_editor_sends_is_understood() -> None:
    """The request of llama.vim: limits of time and samplers that are on here in any case."""
    front = Front()
    answer = front.post(
        "/infill",
        {
            "input_prefix": "a",
            "input_suffix": "b",
            "input_extra": [{"filename": "f.c", "text": "int x;", "time": 1}],
            "prompt": "int",
            "n_predict": 128,
            "n_indent": 4,
            "top_k": 40,
            "top_p": 0.9,
            "samplers": ["top_k", "top_p", "infill"],
            "stream": False,
            "cache_prompt": True,
            "t_max_prompt_ms": 500,
            "t_max_predict_ms": 1000,
            "id_slot": 0,
            "response_fields": ["content", "timings/prompt_n", "tokens_cached"],
        },
    )
    assert answer.status_code == 200, answer.text
    assert set(answer.json()) == {"content", "timings/prompt_n", "tokens_cached"}
    request = front.runtime.requested
    assert request.infill == Infill(prefix="a", suffix="b", extra=[ExtraFile("f.c", "int x;")])
    assert (request.prompt, request.max_generate_s) == ("int", 1.0)
    ignored = answer.headers["x-ignored-fields"].split(", ")
    assert sorted(ignored) == ["id_slot", "n_indent", "samplers", "t_max_prompt_ms"]


@pytest.mark.parametrize("extra", [{}, {"filename": "f"}, {"filename": 1, "text": "x"}, "f"])
def test_a_file_around_a_gap_needs_a_name_and_a_text(extra: Any) -> None:
    gap = {"input_prefix": "a", "input_suffix": "b"}
    error = refusal(Front(), "/infill", **gap, input_extra=[extra])
    assert "input_extra" in error["message"]


def test_no_cache_means_no_reuse() -> None:
    front = Front()
    complete(front, cache_prompt=False)
    assert not front.runtime.requested.reuse


def test_a_stream_can_report_how_much_of_the_prompt_is_read() -> None:
    script: list[Step] = [Started(0, 10, 4), Prefill(0, 8, 10), delta(7), finished()]
    front = Front(ScriptedRuntime(script))
    progress = [
        each["prompt_progress"]
        for each in streamed(front, return_progress=True)
        if "prompt_progress" in each
    ]
    assert [(each["total"], each["cache"], each["processed"]) for each in progress] == [
        (10, 4, 4),
        (10, 4, 8),
    ]
    assert front.runtime.requested.progress


def test_a_prompt_that_is_too_long_has_its_figures() -> None:
    end = failed(400, "invalid_request_error", "context_length_exceeded", "too long")
    end.error.tokens, end.error.limit = 5000, 4096
    error = refusal(Front(ScriptedRuntime([end])))
    assert error["type"] == "exceed_context_size_error"
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (5000, 4096)
    assert "exceeds the available context size" in error["message"]


def test_an_error_in_a_stream_ends_it_in_the_same_shape() -> None:
    script: list[Step] = [Started(0, 10, 0), delta(7), failed(503, "x", "y", "gone")]
    *_, last = streamed(Front(ScriptedRuntime(script)))
    assert last == {"error": {"code": 503, "message": "gone", "type": "unavailable_error"}}


def test_slots_show_how_many_turns_run() -> None:
    front = Front(parallel=3)
    slots = front.get("/slots").json()
    assert [slot["id"] for slot in slots] == [0, 1, 2]
    assert {slot["n_ctx"] for slot in slots} == {4096}
    assert not any(slot["is_processing"] for slot in slots)
    assert front.get("/slots?fail_on_no_slot=1").status_code == 200


def test_slots_of_a_full_batch_are_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ScriptedRuntime, "turns", 2)
    front = Front(parallel=2)
    assert all(slot["is_processing"] for slot in front.get("/slots").json())
    answer = front.get("/slots?fail_on_no_slot=1")
    assert answer.status_code == 503
    assert answer.json()["error"]["type"] == "unavailable_error"


def test_slots_need_an_admin_key() -> None:
    front = Front(api_key=("k",), admin_key=("root",))
    answers = [
        front.get("/slots", headers={"authorization": f"Bearer {key}"}) for key in ("k", "root")
    ]
    assert [answer.status_code for answer in answers] == [403, 200]
    assert answers[0].json()["error"]["type"] == "permission_error"


def test_a_slot_cannot_be_saved_but_the_error_says_what_can() -> None:
    answer = Front().post("/slots/0?action=save", {"filename": "x.bin"})
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "not_supported_error"
    assert "/v1/cache" in answer.json()["error"]["message"]


def test_there_are_no_adapters_to_scale() -> None:
    assert Front().get("/lora-adapters").json() == []


def test_an_embedding_is_a_list_of_vectors_for_each_text() -> None:
    runtime = ScriptedRuntime([Embedded(0, struct.pack("<4f", 1, 0, 0, 1), 2, 5, 2)], name="bert")
    runtime.supervisor.ready = Ready(context_tokens=512, pool_tokens=0, dimensions=2)
    front = Front(embedders=[runtime])
    assert front.post("/embedding", {"content": ["a", "b"]}).json() == [
        {"index": 0, "embedding": [[1.0, 0.0]]},
        {"index": 1, "embedding": [[0.0, 1.0]]},
    ]
    refused = front.post("/embedding", {"content": "a", "embd_normalize": -1}).json()["error"]
    assert "embd_normalize" in refused["message"]


def test_a_wrong_key_is_an_authentication_error() -> None:
    answer = Front(api_key=("k",)).post("/completion", {"prompt": "x"})
    assert answer.status_code == 401
    assert answer.json()["error"]["type"] == "authentication_error"


def test_props_show_context_template_and_modalities() -> None:
    front = Front(ScriptedRuntime(name="tiny"), ScriptedRuntime(name="seeing", sees=True))
    found = front.get("/props").json()
    assert found["default_generation_settings"]["n_ctx"] == 4096
    assert found["model_alias"] == "tiny"
    assert found["chat_template"] == "{{ x }}"
    assert found["modalities"] == {"vision": False, "audio": False}
    assert found["total_slots"] >= 1
    assert found["model_path"] == "tiny.gguf", "the name alone: a path would show the disk"
    assert front.get("/props?model=seeing").json()["modalities"]["vision"] is True
    assert front.get("/props", headers={"x-model-id": "1"}).json()["model_alias"] == "seeing"


def test_a_model_that_is_away_is_unavailable() -> None:
    front = Front()
    front.runtimes[0].supervisor.ready = None
    answer = front.get("/props")
    assert answer.status_code == 503
    assert answer.json()["error"]["type"] == "unavailable_error"
    assert "loading" in answer.json()["error"]["message"]
